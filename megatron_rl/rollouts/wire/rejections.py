"""Counts rollouts that could not be used, and ends the run if there are too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import (
    ABORTED,
    ENDLESS,
    ENVIRONMENT_FAILURE,
    NEVER_SENT,
    NO_RESPONSE,
    STALE,
    Group,
)
from megatron_rl.rewards.runner import LOST
from megatron_rl.rollouts.wire.messages import ENGINE_FAILURE, EXPIRED, PROCESS_LOST

NO_VERDICT = "no_verdict"
NON_FINITE = "logprobs_nonfinite"
_MEANINGS = {
    ENGINE_FAILURE: "no engine answered",
    EXPIRED: "an engine fell silent or is too slow; raise engine.request_timeout_s if it is slow",
    ABORTED: "an engine fell silent or is too slow and cut responses off; raise "
    "engine.request_timeout_s if it is slow",
    ENVIRONMENT_FAILURE: "the environment raised an exception, or took longer than "
    "environment.timeout_s",
    PROCESS_LOST: "the process of the scorer or the environment ended or was silent twice, and no "
    "call is known to be the reason",
    NON_FINITE: "log-probabilities are NaN or infinite, as the weights may be",
    ENDLESS: "the environment requested responses without end",
    NO_RESPONSE: "the environment ended without requesting a response",
    NO_VERDICT: "the scorer failed, or took longer than reward.timeout_s; return "
    "Verdict(reward=0.0, correctness=0.0) for a response that is only incorrect",
    STALE: "sampled with weights older than rollout.max_staleness allows, or older than those that "
    "are evaluated",
    NEVER_SENT: "sampled with a weight version that this run never sent, so another run uses or "
    "used the engines",
}


class UserClassFailed(Failure):
    """The scorer or the environment, not the engines, lost most of the unusable rollouts."""

    exit_code = ExitCode.REFUSED


def require_usable(
    groups: Sequence[Group],
    num_requested: int,
    *,
    subject: str,
    limit: float,
    failure: Callable[[str], Failure],
) -> Counter[str]:
    """Return the unusable rollouts by reason, or raise if there are too many.

    num_requested: number of rollouts that were requested.
    subject: name of the groups for the message.
    limit: the largest share that may be unusable.
    Raises `UserClassFailed` or `failure` when more than this share, or all, are unusable.
    """
    losses = count_unusable(groups)
    if losses.total() > limit * num_requested or losses.total() == num_requested:
        first_error = first_user_class_error(groups, losses)
        text = _message(subject, losses, num_requested, limit, first_error)
        raise UserClassFailed(text) if is_lost_by_user_class(losses) else failure(text)
    return losses


def count_unusable(groups: Iterable[Group]) -> Counter[str]:
    """Count the rollouts that were rejected or have no verdict, by reason."""
    counts = Counter[str]()
    for group in groups:
        counts.update(group.rejections)
        verdicts = [rollout.verdict for rollout in group.rollouts]
        counts.update(_missing_reason(v.reason) for v in verdicts if v.reward is None)
    return counts


def _missing_reason(reason: str) -> str:
    """Return the class of a verdict without a reward."""
    return PROCESS_LOST if reason.startswith(LOST) else NO_VERDICT


def is_lost_by_user_class(losses: Mapping[str, int]) -> bool:
    """Return True if the scorer and the environment lost more rollouts than everything else."""
    by_user_class = _num_lost_by_scorer(losses) + _num_lost_by_environment(losses)
    return 2 * by_user_class > sum(losses.values())


def first_user_class_error(groups: Sequence[Group], losses: Mapping[str, int]) -> str:
    """Return the first error of the scorer or the environment, or an empty string.

    The class that lost more rollouts comes first.
    """
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    scorer_reasons = (r.verdict.reason for r in rollouts if r.verdict.reward is None)
    scorer_error = next(scorer_reasons, "")
    environment_errors = (group.environment_error for group in groups if group.environment_error)
    environment_error = next(environment_errors, "")
    if _num_lost_by_environment(losses) > _num_lost_by_scorer(losses):
        return environment_error or scorer_error
    return scorer_error or environment_error


def _num_lost_by_scorer(losses: Mapping[str, int]) -> int:
    return losses.get(NO_VERDICT, 0)


def _num_lost_by_environment(losses: Mapping[str, int]) -> int:
    reasons = (ENVIRONMENT_FAILURE, NO_RESPONSE, ENDLESS)
    return sum(losses.get(reason, 0) for reason in reasons)


def _message(
    subject: str,
    losses: Mapping[str, int],
    num_requested: int,
    limit: float,
    first_error: str,
) -> str:
    by_count = sorted(losses.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{count} {reason}{_meaning(reason)}" for reason, count in by_count)
    first = f", first: {first_error}" if first_error else ""
    return (
        f"{subject}: {sum(losses.values())} of {num_requested} rollouts cannot be used "
        f"({reasons}){first}; {limit:g} is the largest share that may be lost. "
        "logs/collector-*.log in the run directory shows the first of each kind with its cause, "
        "logs/engine-*.log the engines' messages"
    )


def _meaning(reason: str) -> str:
    return f" ({_MEANINGS[reason]})" if reason in _MEANINGS else ""
