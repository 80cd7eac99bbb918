"""Chooses the responses of a step that the run keeps.

The choice depends on the step, the seed and the batch alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.credit.group_kinds import CORRECT_THRESHOLD
from megatron_rl.records.samples.sample import SampleKind

# Bytes of a token in a file: an id, five float32 numbers, an int8, and its text twice. Those of a
# sample are its other columns. Compression makes a file smaller.
_TOKEN_BYTES = 40
_SAMPLE_BYTES = 512
# A step's file stays small enough to keep one for every few steps and to open it in a browser.
MAX_BYTES = 4 * 2**20
# More groups than there are kinds of extreme responses, and few enough to read.
MAX_GROUPS = 8


@dataclass(frozen=True)
class Choice:
    """One response to keep.

    group: position of its group in the batch.
    """

    group: int
    rollout: RolloutRef
    kinds: tuple[SampleKind, ...] = ()


@dataclass(frozen=True)
class Choices:
    """The responses to keep, the most important ones first.

    num_left_out: responses of chosen groups that do not fit into the file.
    """

    choices: tuple[Choice, ...]
    num_left_out: int


def choose_samples(
    groups: Sequence[Group],
    trained_extremes: Mapping[SampleKind, RolloutRef],
    seed: str,
    *,
    max_bytes: int = MAX_BYTES,
    max_groups: int = MAX_GROUPS,
) -> Choices:
    """Choose whole groups: first groups with an extreme response, then random ones.

    The extremes are chosen before the other responses of their groups, as far as the file has room.

    groups: all groups of the step.
    trained_extremes: extremes that only the training ranks can tell.
    max_bytes: the largest size of the file. max_groups: the largest number of groups.
    """
    candidates = [
        Choice(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts
    ]
    extremes = _extremes(candidates, trained_extremes)
    places = list(dict.fromkeys(choice.group for choice in extremes))
    others = [i for i, group in enumerate(groups) if group.rollouts and i not in places]
    num_random = max(0, max_groups - len(places))
    places += random.Random(seed).sample(others, min(num_random, len(others)))
    places = places[:max_groups]
    return _fit(_in_order(extremes, candidates, places), max_bytes)


def _extremes(
    candidates: Sequence[Choice], trained_extremes: Mapping[SampleKind, RolloutRef]
) -> list[Choice]:
    """Return the extreme responses in the order of `SampleKind`. Of equal ones the first counts."""
    extremes: dict[str, Choice] = {}
    kinds: dict[str, list[SampleKind]] = {}
    for kind in SampleKind:
        extreme = _extreme(kind, candidates, trained_extremes)
        if extreme is not None:
            rollout_id = extreme.rollout.rollout_id
            extremes.setdefault(rollout_id, extreme)
            kinds.setdefault(rollout_id, []).append(kind)
    return [
        Choice(extreme.group, extreme.rollout, tuple(kinds[rollout_id]))
        for rollout_id, extreme in extremes.items()
    ]


def _extreme(
    kind: SampleKind,
    candidates: Sequence[Choice],
    trained_extremes: Mapping[SampleKind, RolloutRef],
) -> Choice | None:
    match kind:
        case SampleKind.SHORTEST:
            return min(candidates, key=_length, default=None)
        case SampleKind.LONGEST:
            return max(candidates, key=_length, default=None)
        case SampleKind.SUREST_INCORRECT:
            return max(filter(_is_incorrect, candidates), key=_mean_logprob, default=None)
    ref = trained_extremes.get(kind)
    if ref is None:
        return None
    return next((c for c in candidates if c.rollout.rollout_id == ref.rollout_id), None)


def _length(choice: Choice) -> int:
    return choice.rollout.num_trainable


def _is_incorrect(choice: Choice) -> bool:
    correctness = choice.rollout.verdict.correctness
    is_sampled = choice.rollout.mean_logprob is not None
    return is_sampled and correctness is not None and correctness < CORRECT_THRESHOLD


def _mean_logprob(choice: Choice) -> float:
    assert choice.rollout.mean_logprob is not None
    return choice.rollout.mean_logprob


def _in_order(
    extremes: Sequence[Choice], candidates: Sequence[Choice], places: Sequence[int]
) -> Iterator[Choice]:
    """Yield the extremes in the chosen groups, and then the other responses of these groups."""
    extreme_ids = {extreme.rollout.rollout_id for extreme in extremes}
    yield from (extreme for extreme in extremes if extreme.group in places)
    for place in places:
        for candidate in candidates:
            if candidate.group == place and candidate.rollout.rollout_id not in extreme_ids:
                yield candidate


def _fit(choices: Iterable[Choice], max_bytes: int) -> Choices:
    """Leave out each response for which the file has no room."""
    free_bytes = max_bytes
    fitting_choices = []
    num_left_out = 0
    for choice in choices:
        num_bytes = _SAMPLE_BYTES + _TOKEN_BYTES * (choice.rollout.num_inputs + 1)
        if num_bytes <= free_bytes:
            free_bytes -= num_bytes
            fitting_choices.append(choice)
        else:
            num_left_out += 1
    return Choices(tuple(fitting_choices), num_left_out)
