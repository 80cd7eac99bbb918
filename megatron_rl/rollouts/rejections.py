"""What is said of rollouts that could not be used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import NEVER_SENT, STALE, Group
from megatron_rl.rollouts.messages import ENGINE_FAILURE, ENVIRONMENT_FAILURE, EXPIRED

NO_VERDICT = "no_verdict"
_MEANINGS = {
    ENGINE_FAILURE: "no engine answered",
    EXPIRED: "an engine fell silent or is too slow; engine.token_timeout_s gives it time",
    ENVIRONMENT_FAILURE: "the environment raised an exception",
    "logprobs_nonfinite": "log-probabilities are NaN or infinite, as the weights may be",
    NO_VERDICT: "the scorer failed, or took longer than reward.timeout_s",
    STALE: "drawn with weights older than rollout.max_staleness allows, or than those that are evaluated",
    NEVER_SENT: "drawn with weights of a version that this run never sent: another run uses the engines, or did",
}


class UserClassFailed(Failure):
    """Most of the rollouts that were lost were lost by the scorer or the environment, not by
    engines.
    """

    exit_code = ExitCode.REFUSED


def unusable(groups: Iterable[Group]) -> Counter[str]:
    """Rollouts that were rejected or have no verdict, by reason."""
    found = Counter[str]()
    for group in groups:
        found.update(group.rejections)
        without = len(group.rollouts) - len(group.rollouts_with_verdict)
        if without:
            found[NO_VERDICT] += without
    return found


def lost_by_user_class(lost: Mapping[str, int]) -> bool:
    """Whether it was rather the scorer or the environment than engines and networks."""
    return 2 * (lost.get(NO_VERDICT, 0) + lost.get(ENVIRONMENT_FAILURE, 0)) > sum(lost.values())


def first_reason(groups: Iterable[Group]) -> str:
    """What a scorer said first of why there is no verdict, with its line; empty when it said
    nothing.
    """
    samples = (sample for group in groups for sample in group.rollouts)
    return next((s.verdict.reason for s in samples if s.verdict.reward is None), "")


def too_many(
    what: str, lost: Mapping[str, int], asked: int, *, key: str, most: float, first: str = ""
) -> str:
    """The sentence that ends a run: how many, why, the rule and where to look. most: the share that
    `key` allows.

    first: see `first_reason`.
    """
    ordered = sorted(lost.items(), key=lambda item: (-item[1], item[0]))
    reasons = ", ".join(f"{count} {reason}{_meaning(reason)}" for reason, count in ordered)
    said = f", first: {first}" if first else ""
    return (
        f"{what}: {sum(lost.values())} of {asked} rollouts cannot be used ({reasons}){said}; {key}={most:g} is the "
        "largest share that may be lost. logs/collector-*.log in the run directory shows the first of each kind "
        "with its cause, logs/engine-*.log what the engines say"
    )


def _meaning(reason: str) -> str:
    return f" ({_MEANINGS[reason]})" if reason in _MEANINGS else ""
