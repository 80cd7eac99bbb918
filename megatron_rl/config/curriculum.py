"""The curriculum of a run: phases that change keys until a step, a token budget or an accuracy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le
from pydantic import TypeAdapter, ValidationError

from megatron_rl.config.schema import Configuration, Name, Positive, Section
from megatron_rl.contracts.refusal import Refusal

_CHANGEABLE_KEYS = (
    "data.pass_rate_range",
    "rollout.max_new_tokens",
    "rollout.samples_per_prompt",
    "rollout.temperature",
    "optimizer.lr",
    "algo.clip_low",
    "algo.clip_high",
    "algo.alpha",
    "algo.min_clip",
    "algo.fixed_clip",
)
# Keys whose fixed values a run's stored rollouts depend on: repetitions are counted where rollouts
# are stored, by the n that the run began with.
_FIXED_CREDIT_KEYS = ("credit.repetition_ngram",)


@dataclass(frozen=True, kw_only=True)
class PhaseEnd(Section):
    """The limits of a phase. The first one that is reached ends it."""

    # The last step of the phase, counted from the start of the run.
    steps: Positive | None = None
    # Tokens generated for training since the start of the run.
    tokens: Annotated[int, Ge(1)] | None = None
    # The accuracy of one evaluation within the phase.
    accuracy: Annotated[float, Gt(0), Le(1)] | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseSettings(Section):
    """The keys of a phase, besides the keys of the configuration that it changes."""

    name: Name
    # null: the phase lasts until the end of the run.
    until: PhaseEnd | None = None
    # all: beliefs about pass rates start the phase with their full initial uncertainty.
    reset_certainty: Literal["all"] | None = None


_CONFIGURATION = TypeAdapter(Configuration)
_PHASE_SETTINGS = TypeAdapter(PhaseSettings)


@dataclass(frozen=True)
class Phase:
    """One phase of a run's curriculum.

    changes: the values that this phase sets, by full key.
    configuration: the whole configuration of the phase, with its changes and the changes of all
    previous phases.
    """

    settings: PhaseSettings
    changes: Mapping[str, Any]
    configuration: Configuration


def phases_of(c: Configuration) -> list[Phase]:
    """Return the phases of a configuration in their order; an empty list without a curriculum."""
    return list(_merge_phases(c))


def sized_for_all_phases(c: Configuration) -> Configuration:
    """Return the configuration by which engines and memory are sized once for the whole run.

    It has the longest responses and the largest groups of all phases.
    """
    rollouts = [phase.configuration.rollout for phase in phases_of(c)] or [c.rollout]
    longest = max(rollout.max_new_tokens for rollout in rollouts)
    largest = max(rollout.samples_per_prompt for rollout in rollouts)
    return replace(
        c, rollout=replace(c.rollout, max_new_tokens=longest, samples_per_prompt=largest)
    )


def sized_for_engines(c: Configuration) -> Configuration:
    """Return `sized_for_all_phases`, with responses as long as in evaluations."""
    whole_run = sized_for_all_phases(c)
    longest = max(whole_run.rollout.max_new_tokens, *c.eval.longest_responses.values(), 0)
    return replace(whole_run, rollout=replace(whole_run.rollout, max_new_tokens=longest))


def phase_refusals(
    c: Configuration, explain: Callable[[ValidationError], Iterable[Refusal]]
) -> Iterator[Refusal]:
    """Yield every mistake in the entries of the curriculum.

    explain: turns pydantic's error into refusals. The rules across keys are not checked here; the
    caller checks them for the configuration of each phase.
    """
    if c.curriculum is None:
        return
    if c.mode != "train":
        rule = f"mode={c.mode} has no training steps for phases"
        yield Refusal("curriculum", "[...]", rule, "Use mode=train, or curriculum=null")
    if not c.curriculum:
        remedy = "Give at least one, as in docs/curriculum.md, or use null"
        yield Refusal("curriculum", "[]", "The list has no phase", remedy)
    yield from _unchangeable_keys(c.curriculum)
    phases = list[Phase]()
    try:
        phases.extend(_merge_phases(c))
    except ValidationError as error:
        path = _entry_path(len(phases), c.curriculum[len(phases)])
        for refusal in explain(error):
            yield refusal._replace(key=f"{path}.{refusal.key}")
        return
    yield from _repeated_names(phases)
    for phase in phases:
        yield from _phase_problems(c, phase, is_last=phase is phases[-1])
    yield from _ends_before_start(phases)


def _merge_phases(c: Configuration) -> Iterator[Phase]:
    """Yield the phases; raises `ValidationError` for values of a wrong type or beyond their limits.

    Each phase starts from the keys of the previous one.
    """
    tree = asdict(replace(c, curriculum=None))
    for entry in c.curriculum or ():
        changes = {key: value for key, value in entry.items() if "." in key}
        for key, value in changes.items():
            if _is_changeable(key):
                section, _, name = key.partition(".")
                text = str(value).lower() if isinstance(value, bool) else value
                tree[section] = tree.get(section, {}) | {name: text}
        others = {key: value for key, value in entry.items() if "." not in key}
        settings = _PHASE_SETTINGS.validate_python(others)
        yield Phase(settings, changes, _CONFIGURATION.validate_python(tree))


def _is_changeable(key: str) -> bool:
    if key.startswith("credit."):
        return key not in _FIXED_CREDIT_KEYS
    return key in _CHANGEABLE_KEYS


def _entry_path(number: int, entry: Mapping[str, Any]) -> str:
    """Return the key of an entry, such as curriculum[short]."""
    return f"curriculum[{entry.get('name', number)}]"


def _unchangeable_keys(entries: Sequence[Mapping[str, Any]]) -> Iterator[Refusal]:
    rule = "A phase cannot change this key, because the run is built from it once"
    remedy = f"Keys that a phase can change: {', '.join(_CHANGEABLE_KEYS)}, credit.*"
    for number, entry in enumerate(entries):
        for key, value in entry.items():
            if "." in key and not _is_changeable(key):
                yield Refusal(f"{_entry_path(number, entry)}.{key}", value, rule, remedy)


def _repeated_names(phases: Sequence[Phase]) -> Iterator[Refusal]:
    names = [phase.settings.name for phase in phases]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Refusal("curriculum", name, "Two phases have this name", "Give each its own name")


def _phase_problems(c: Configuration, phase: Phase, *, is_last: bool) -> Iterator[Refusal]:
    """Yield the mistakes of a phase that do not depend on the other phases."""
    path = f"curriculum[{phase.settings.name}]"
    end = phase.settings.until or PhaseEnd()
    if end == PhaseEnd() and (phase.settings.until or not is_last):
        remedy = "Give steps, tokens or accuracy"
        yield Refusal(f"{path}.until", "null", "This phase would never end", remedy)
    if phase.settings.reset_certainty and c.selection.name != "belief":
        rule = f"selection.name={c.selection.name} has no beliefs about prompts"
        remedy = "Remove it, or use selection=belief"
        yield Refusal(f"{path}.reset_certainty", "all", rule, remedy)
    if end.accuracy and not c.eval.every:
        rule = "With eval.every=0 no accuracy is measured within a phase"
        yield Refusal(f"{path}.until.accuracy", end.accuracy, rule, "Raise eval.every")
    yield from _unrepeatable_end(c, path, end)
    if not is_last and (end.steps or 0) >= c.train.total_steps:
        rule = f"The next phase would begin after train.total_steps={c.train.total_steps}"
        yield Refusal(
            f"{path}.until.steps", end.steps, rule, "Lower it, or raise train.total_steps"
        )


def _unrepeatable_end(c: Configuration, path: str, end: PhaseEnd) -> Iterator[Refusal]:
    if end.tokens and c.selection.surplus == "abort":
        rule = (
            "With selection.surplus=abort, the number of tokens depends on the time at which "
            "responses are aborted, so that the end of the phase would not repeat"
        )
        remedy = "Give steps, or use selection.surplus=finish"
        yield Refusal(f"{path}.until.tokens", end.tokens, rule, remedy)


def _ends_before_start(phases: Sequence[Phase]) -> Iterator[Refusal]:
    """Yield the phases that would end before they begin: steps and tokens count from the start of
    the run.
    """
    for unit in ("steps", "tokens"):
        previous_name = ""
        previous_limit = 0
        for phase in phases:
            limit = getattr(phase.settings.until or PhaseEnd(), unit)
            if not limit:
                continue
            if limit <= previous_limit:
                rule = (
                    f"The phase would end before it begins: {previous_name} lasts until "
                    f"{previous_limit}, and both count from the start of the run"
                )
                key = f"curriculum[{phase.settings.name}].until.{unit}"
                yield Refusal(key, limit, rule, f"Give more than {previous_limit}")
            previous_name = phase.settings.name
            previous_limit = limit
