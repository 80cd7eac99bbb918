"""Rollouts of one prompt with their verdicts.

Rank 0 plans with these records. The tokens stay with the collector.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.wire_types import Count, Fraction

# Reasons in `Group.rejections`
ENVIRONMENT_FAILURE = "environment"  # the environment raised an exception, or gave a response up
ABORTED = "aborted"  # the engine stopped a response before its end, such as at its deadline
NO_RESPONSE = "no_response"  # the environment requested no response
ENDLESS = "endless"  # the environment requested responses without end
STALE = "stale"  # the rollout's weights are older than rollout.max_staleness allows
NEVER_SENT = "version_never_sent"  # the trainer has not sent this weight version to any engine


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Result of scoring one rollout.

    reward: None if scoring failed or timed out. Such a rollout is counted, but not in its group's
    statistics. It does not count as a reward of zero.
    correctness: raw score from 0 to 1 without shaping terms, used to find zero-variance groups.
    None for every rollout of a prompt without a known answer, such as with a reward model.
    penalty: flaw of the response from 0 to 1, apart from its correctness. It shapes the advantages
    of groups with correctness (`credit.shaping`). It is not subtracted from the reward.
    answer: final answer in the response, None if there is none.
    seconds: scoring time.
    reason: why scoring gave no reward.
    parts: with several scorers, the reward of each part by name, without those that gave none.
    """

    reward: float | None
    correctness: float | None
    penalty: Fraction = 0.0
    answer: str | None = None
    seconds: float = 0.0
    reason: str = ""
    parts: dict[str, float] = {}


class RolloutLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Location of an encoded rollout: bytes [offset, offset + nbytes) of a shared-memory segment.

    node, pid, fd: node, process and file descriptor that hold the segment.
    """

    node: Count
    pid: Count
    fd: Count
    offset: Count
    nbytes: Count


class RolloutRef(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that rank 0 needs of one rollout to plan a step. The collector keeps the tokens.

    num_inputs: tokens that the model reads when it trains on the rollout, all but the last.
    num_trainable: tokens that receive a loss.
    num_generated: tokens that engines sampled for the rollout.
    repetition: share of repeated n-grams from 0 to 1, 0 if it is not measured.
    is_repetitive: its last response was cut off, because it repeated itself.
    mean_logprob: mean log-probability of the sampled tokens under the policy that sampled them,
    nats. None without sampled tokens.
    tokens_by_version: (weight version, number of sampled tokens) pairs, by ascending version.
    """

    rollout_id: str
    prompt_id: str
    sample_index: Count
    num_inputs: Count
    num_trainable: Count
    num_generated: Count = 0
    repetition: float = 0.0
    is_repetitive: bool = False
    mean_logprob: float | None = None
    finish_reason: FinishReason
    tokens_by_version: tuple[tuple[int, int], ...]
    verdict: Verdict
    location: RolloutLocation

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that sampled it, ascending."""
        return tuple(version for version, _ in self.tokens_by_version)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Rollouts of one prompt, with verdicts.

    rejections: number of rollouts that were dropped before scoring, by reason.
    rejected_tokens: number of tokens that engines sampled for them, and for responses that were
    sampled again, by reason.
    weight: factor of the group's advantages. A factor other than 1 compensates for groups of the
    same prompt that were stopped early, or for how seldom the prompt is sampled.
    prompt_weight: the second of these alone, which does not depend on the rollouts.
    environment_error: description of the first error of the environment, "" without one.
    generated_at, scored_at: times of the last response and of the last verdict, in seconds of the
    collector's monotonic clock.
    open_samples: sample indices of rollouts that are still being sampled or scored. Only groups
    that a checkpoint holds have some. Such a rollout has no verdict. It is in `rollouts` if it has
    tokens.
    """

    group_id: str
    prompt: Prompt
    rollouts: tuple[RolloutRef, ...]
    rejections: dict[str, int] = {}
    rejected_tokens: dict[str, int] = {}
    weight: float = 1.0
    prompt_weight: float = 1.0
    environment_error: str = ""
    generated_at: float = 0.0
    scored_at: float = 0.0
    open_samples: tuple[Count, ...] = ()

    @property
    def rollouts_with_verdict(self) -> tuple[RolloutRef, ...]:
        return tuple(rollout for rollout in self.rollouts if rollout.verdict.reward is not None)


def mean_of_parts(rollouts: Iterable[RolloutRef]) -> dict[str, float]:
    """Return the mean reward of each part of the verdicts, by name in alphabetical order."""
    rewards: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, reward in rollout.verdict.parts.items():
            rewards.setdefault(name, []).append(reward)
    return {name: sum(values) / len(values) for name, values in sorted(rewards.items())}


def sampled_tokens(group: Group) -> int:
    """Count the tokens that engines sampled for a group, including its rejected rollouts."""
    in_rollouts = sum(rollout.num_generated for rollout in group.rollouts)
    return in_rollouts + sum(group.rejected_tokens.values())
