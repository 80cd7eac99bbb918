"""Stages of a run: each is the configuration with a few keys changed, until a step, a token budget or an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter, ValidationError

from megatron_rl.config.schema import Configuration, Name, Section
from megatron_rl.contracts.refusal import Refusal

_CHANGES = (
    "data.band", "rollout.max_new_tokens", "rollout.samples_per_prompt", "rollout.temperature", "optimizer.lr",
    "algo.clip_low", "algo.clip_high", "algo.alpha", "algo.min_clip", "algo.fixed_clip", "credit.",
)  # fmt: skip
Number = Annotated[int, Ge(1)]


@dataclass(frozen=True, kw_only=True)
class Until(Section):
    """What ends a stage, whichever comes first. steps, tokens: of the whole run; accuracy: at an evaluation within."""

    steps: Number | None = None
    tokens: Number | None = None
    accuracy: Annotated[float, Gt(0), Le(1)] | None = None


@dataclass(frozen=True, kw_only=True)
class Entry(Section):
    """What a stage says beside the keys that it changes. reprofile: what is believed of prompts loses its certainty."""

    name: Name
    until: Until | None = None
    reprofile: Literal["all"] | None = None


_CONFIGURATION, _ENTRY = TypeAdapter(Configuration), TypeAdapter(Entry)


@dataclass(frozen=True)
class Stage:
    """changes: its own keys; configuration: with these and those of the stages before it."""

    entry: Entry
    changes: Mapping[str, Any]
    configuration: Configuration


def stages_of(c: Configuration) -> list[Stage]:
    """The stages in their order; none without the key."""
    return list(_merged(c))


def _merged(c: Configuration) -> Iterator[Stage]:
    """Raises `ValidationError` for values that are of no such type."""
    tree = asdict(replace(c, stages=None))
    for given in c.stages or ():
        changes = {key: value for key, value in given.items() if "." in key}
        for key, value in filter(lambda change: _may_change(change[0]), changes.items()):
            section, _, name = key.partition(".")
            tree[section] = tree.get(section, {}) | {name: str(value).lower() if isinstance(value, bool) else value}
        entry = _ENTRY.validate_python({key: value for key, value in given.items() if "." not in key})
        yield Stage(entry, changes, _CONFIGURATION.validate_python(tree))


def widest(c: Configuration) -> Configuration:
    """With the longest responses and the largest groups of all stages: what is sized once, at the start."""
    rollouts = [stage.configuration.rollout for stage in stages_of(c)] or [c.rollout]
    longest, largest = max(r.max_new_tokens for r in rollouts), max(r.samples_per_prompt for r in rollouts)
    return replace(c, rollout=replace(c.rollout, max_new_tokens=longest, samples_per_prompt=largest))


def refused_stages(c: Configuration, told: Callable[[ValidationError], Iterable[Refusal]]) -> Iterator[Refusal]:
    """Everything that is wrong with the entries; the rules are kept for each of `stages_of`. told: types and limits."""
    if c.stages is None:
        return
    if c.mode != "train":
        yield Refusal("stages", "[...]", f"mode={c.mode} does not train step after step", "Use mode=train, or null")
    if not c.stages:
        yield Refusal("stages", "[]", "It names no stage", "Give one, as in docs/stages.md, or null")
    for number, given in enumerate(c.stages):
        where = f"stages[{given.get('name', number)}]"
        for key, value in given.items():
            if "." in key and not _may_change(key):
                rule = "No stage changes it: what a run is built from stays as it is"
                yield Refusal(f"{where}.{key}", value, rule, f"A stage may change {', '.join(_CHANGES)}*")
    stages = list[Stage]()
    try:
        stages.extend(_merged(c))
    except ValidationError as error:
        where = f"stages[{c.stages[len(stages)].get('name', len(stages))}]"
        yield from (refusal._replace(key=f"{where}.{refusal.key}") for refusal in told(error))
        return
    yield from _out_of_order(c, stages)


def _may_change(key: str) -> bool:
    return key in _CHANGES or key.startswith("credit.")


def _out_of_order(c: Configuration, stages: Sequence[Stage]) -> Iterator[Refusal]:
    names = [stage.entry.name for stage in stages]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Refusal("stages", name, "Two stages have this name", "Give each a name of its own")
    for stage in stages:
        until, where = stage.entry.until, f"stages[{stage.entry.name}].until"
        if (until is None and stage is not stages[-1]) or until == Until():
            yield Refusal(where, "null", "Nothing would end it", "Give steps, tokens or accuracy: until: {steps: 100}")
        if stage.entry.reprofile and c.selection.name != "belief":
            rule = f"selection.name={c.selection.name} believes nothing of prompts"
            yield Refusal(f"stages[{stage.entry.name}].reprofile", "all", rule, "Remove it, or use selection=belief")
        if until is not None and until.accuracy is not None and not c.eval.every:
            yield Refusal(f"{where}.accuracy", until.accuracy, "eval.every=0 measures none", "Raise eval.every")
        if (
            until is not None
            and until.steps is not None
            and until.steps >= c.train.total_steps
            and stage is not stages[-1]
        ):
            rule = f"The next stage would begin after train.total_steps={c.train.total_steps}"
            yield Refusal(f"{where}.steps", until.steps, rule, "Lower it, or raise train.total_steps")
    for kind in ("steps", "tokens"):
        ends = [(s, asdict(s.entry.until)[kind]) for s in stages if s.entry.until and asdict(s.entry.until)[kind]]
        for (before, first), (stage, second) in pairwise(ends):
            if second <= first:
                rule = (
                    f"It ends before it begins: {before.entry.name} lasts until {first}, and both count from the start"
                )
                yield Refusal(f"stages[{stage.entry.name}].until.{kind}", second, rule, f"Give more than {first}")
