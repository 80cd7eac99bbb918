"""Stages of a run: each is the configuration with a few keys changed, until a step, a token budget
or an accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter, ValidationError

from megatron_rl.config.schema import Configuration, Name, Positive, Section
from megatron_rl.contracts.refusal import Refusal

_CHANGES = (
    "data.band",
    "rollout.max_new_tokens",
    "rollout.samples_per_prompt",
    "rollout.temperature",
    "optimizer.lr",
    "algo.clip_low",
    "algo.clip_high",
    "algo.alpha",
    "algo.min_clip",
    "algo.fixed_clip",
    "credit.",
)


@dataclass(frozen=True, kw_only=True)
class Until(Section):
    """What ends a stage, whichever comes first.

    steps, tokens: of the whole run; accuracy: at an evaluation within.
    """

    steps: Positive | None = None
    tokens: Annotated[int, Ge(1)] | None = None
    accuracy: Annotated[float, Gt(0), Le(1)] | None = None


@dataclass(frozen=True, kw_only=True)
class Entry(Section):
    """What one of `stages` says beside the keys that it changes.

    reprofile: beliefs of prompts lose their certainty.
    """

    name: Name
    until: Until | None = None  # null: the end of the run
    reset_certainty: Literal["all"] | None = None


_CONFIGURATION, _ENTRY = TypeAdapter(Configuration), TypeAdapter(Entry)


@dataclass(frozen=True)
class Stage:
    """changes: its own keys; configuration: with these and those of the stages before it."""

    entry: Entry
    changes: Mapping[str, Any]
    configuration: Configuration


def phases_of(c: Configuration) -> list[Stage]:
    """The stages in their order; none without the key."""
    return list(_merged(c))


def _merged(c: Configuration) -> Iterator[Stage]:
    """Raises `ValidationError` for values that are of no such type."""
    tree = asdict(replace(c, stages=None))
    for given in c.stages or ():
        changes = {key: value for key, value in given.items() if "." in key}
        for key, value in filter(lambda change: _may_change(change[0]), changes.items()):
            section, _, name = key.partition(".")
            tree[section] = tree.get(section, {}) | {
                name: str(value).lower() if isinstance(value, bool) else value
            }
        entry = _ENTRY.validate_python(
            {key: value for key, value in given.items() if "." not in key}
        )
        yield Stage(entry, changes, _CONFIGURATION.validate_python(tree))


def phase_refusals(
    c: Configuration, told: Callable[[ValidationError], Iterable[Refusal]]
) -> Iterator[Refusal]:
    """Everything that is wrong with the entries; the rules are kept for each of `phases_of`. told:
    types and limits.
    """
    if c.stages is None:
        return
    if c.mode != "train":
        yield Refusal(
            "stages",
            "[...]",
            f"mode={c.mode} does not train step after step",
            "Use mode=train, or null",
        )
    if not c.stages:
        yield Refusal(
            "stages", "[]", "It names no stage", "Give one, as in docs/stages.md, or null"
        )
    for number, given in enumerate(c.stages):
        where = f"stages[{given.get('name', number)}]"
        for key, value in given.items():
            if "." in key and not _may_change(key):
                rule = "No stage changes it: what a run is built from stays as it is"
                yield Refusal(
                    f"{where}.{key}", value, rule, f"A stage may change {', '.join(_CHANGES)}*"
                )
    stages = list[Stage]()
    try:
        stages.extend(_merged(c))
    except ValidationError as error:
        where = f"stages[{c.stages[len(stages)].get('name', len(stages))}]"
        yield from (refusal._replace(key=f"{where}.{refusal.key}") for refusal in told(error))
        return
    yield from _out_of_order(c, stages)


def _may_change(key: str) -> bool:
    """Penalties of repetition are counted where rollouts are stored, by the n that the run began
    with.
    """
    return key in _CHANGES or (key.startswith("credit.") and key != "credit.repetition_ngram")


def _out_of_order(c: Configuration, stages: Sequence[Stage]) -> Iterator[Refusal]:
    names, ends = [stage.entry.name for stage in stages], dict[str, tuple[str, int]]()
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Refusal("stages", name, "Two stages have this name", "Give each a name of its own")
    for stage in stages:
        entry, where, last = stage.entry, f"stages[{stage.entry.name}]", stage is stages[-1]
        until = entry.until or Until()
        if until == Until() and (entry.until or not last):
            yield Refusal(
                f"{where}.until", "null", "Nothing would end it", "Give steps, tokens or accuracy"
            )
        if entry.reset_certainty and c.selection.name != "belief":
            rule = f"selection.name={c.selection.name} believes nothing of prompts"
            yield Refusal(f"{where}.reprofile", "all", rule, "Remove it, or use selection=belief")
        if until.accuracy and not c.eval.every:
            yield Refusal(
                f"{where}.until.accuracy",
                until.accuracy,
                "eval.every=0 measures none",
                "Raise eval.every",
            )
        if not last and (until.steps or 0) >= c.train.total_steps:
            rule = f"The next stage would begin after train.total_steps={c.train.total_steps}"
            yield Refusal(
                f"{where}.until.steps", until.steps, rule, "Lower it, or raise train.total_steps"
            )
        for kind, end in (("steps", until.steps), ("tokens", until.tokens)):
            before, most = ends.get(kind, ("", 0))
            if end and end <= most:
                rule = f"It ends before it begins: {before} lasts until {most}, and both count from the run's start"
                yield Refusal(f"{where}.until.{kind}", end, rule, f"Give more than {most}")
            ends[kind] = (entry.name, end) if end else (before, most)
