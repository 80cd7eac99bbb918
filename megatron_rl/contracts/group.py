"""One prompt's rollouts with their verdicts: what rank 0 plans with; the tokens stay with the
collector.
"""

from __future__ import annotations

import msgspec

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.wire_types import Count

# the reason in `Group.rejected` for rollouts of weights older than rollout.max_staleness allows
STALE = "stale"
NEVER_SENT = "version_never_sent"  # ... and of a version that is above the trainer's own


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the reward says of one rollout.

    reward: None when there is no verdict (the scorer failed or timed out): such a rollout leaves
    its group's statistics and is counted; it is not a zero. correctness: the raw score that zero
    variance is judged on, apart from shaping terms; None for all of a prompt where no truth is
    known, as with a judge. answer: the final answer found in the response, None when there is none
    to be found. seconds: scoring time. reason: why there is no verdict.
    """

    reward: float | None
    correctness: float | None
    answer: str | None = None
    seconds: float = 0.0
    reason: str = ""


class RolloutLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a collector keeps an encoded rollout: bytes [offset, offset + nbytes) of one
    shared-memory segment.
    """

    node: Count
    pid: Count
    fd: Count
    offset: Count
    nbytes: Count


class RolloutRef(msgspec.Struct, frozen=True, kw_only=True):
    """All that rank 0 needs to know of a rollout to plan a step; the tokens stay with its
    collector.

    num_inputs: tokens the model reads when it trains on it (all tokens but the last).
    num_trainable: tokens that receive a loss. generated: tokens that engines drew for it.
    repetition: how much of them repeats itself, from 0 to 1, where that is asked for. versions:
    weight versions of its sampled segments, ascending.
    """

    rollout_id: str
    prompt_id: str
    sample_index: Count
    num_inputs: Count
    num_trainable: Count
    generated: Count = 0
    repetition: float = 0.0
    finish_reason: FinishReason
    versions: tuple[int, ...]
    verdict: Verdict
    location: RolloutLocation


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's rollouts and verdicts.

    rejected, rejected_tokens: rollouts dropped before a verdict and the tokens that engines drew
    for them, by reason. weight: multiplies the group's advantages; other than 1 it makes up for
    groups of its prompt that were stopped early. generated_at, judged_at: when the last response
    arrived and when the last verdict was there, in seconds of the collector's monotonic clock.
    """

    group_id: str
    prompt: Prompt
    rollouts: tuple[RolloutRef, ...]
    rejected: dict[str, int] = {}
    rejected_tokens: dict[str, int] = {}
    weight: float = 1.0
    generated_at: float = 0.0
    judged_at: float = 0.0

    @property
    def judged(self) -> tuple[RolloutRef, ...]:
        """The rollouts with a verdict."""
        return tuple(rollout for rollout in self.rollouts if rollout.verdict.reward is not None)


def drawn_tokens(group: Group) -> int:
    """Tokens that engines drew for a group: those of its rollouts and of the rejected ones."""
    return sum(rollout.generated for rollout in group.rollouts) + sum(
        group.rejected_tokens.values()
    )
