"""Runs a scorer on responses as they arrive, while engines generate others."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import error_location, error_text
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rewards.user_calls import Ending, Outcome, call_with_limit

# Beginning of the reason of a verdict that is missing because the scorer's process was lost
LOST = "the scorer's process was lost twice"
MAX_REASON_LENGTH = 200
_MAX_ANSWER_LENGTH = 1000
# Limit of a reward's magnitude. Larger values leave means and deviations without meaning.
_MAX_MAGNITUDE = 1e6
# Parts of a verdict. Each has a metric.
_MAX_PARTS = 64
# Decimals of a score. Sums of the same parts in another order, also in float32, are then one score.
_DECIMALS = 6


class ScorerCalls(Protocol):
    """Calls of one scorer: in this process, or in another one."""

    async def score(
        self, prompt: Prompt, text: str, finish_reason: FinishReason, *, subject: str
    ) -> Outcome[Verdict]:
        """Score one response. subject: names it in warnings."""
        ...


class ScorerInThisProcess:
    """Calls a scorer of this project, which cannot block or ignore its cancellation.

    timeout_s: seconds for one response. None: the scorer itself limits its calls.
    """

    def __init__(self, scorer: Scorer, *, timeout_s: float | None) -> None:
        self._scorer = scorer
        self._timeout_s = timeout_s

    async def score(
        self, prompt: Prompt, text: str, finish_reason: FinishReason, *, subject: str
    ) -> Outcome[Verdict]:
        """Score one response. Cancelling this cancels the scorer."""
        call = partial(self._scorer.score, prompt, text, finish_reason)
        return await call_with_limit(call, self._timeout_s)


class RewardRunner:
    """Calls a scorer and checks its results.

    calls: the calls of the scorer. A call that is over its time gives no reward.
    hide_values: leaves secret values out of the reason for a missing reward.
    """

    def __init__(self, calls: ScorerCalls, *, hide_values: Callable[[str], str] = str) -> None:
        self._calls = calls
        self._hide_values = hide_values

    async def score(
        self, prompt: Prompt, text: str, finish_reason: FinishReason, *, subject: str = ""
    ) -> Verdict:
        """Score one response. A failing scorer gives a verdict without a reward, with the reason.

        Any number of calls may run at the same time. Cancelling a call cancels its scorer.

        subject: names the response in warnings.
        Raises `Failure` if the scorer cannot be opened again.
        """
        start = time.perf_counter()
        outcome = await self._calls.score(prompt, text, finish_reason, subject=subject)
        verdict = make_verdict(outcome, self._hide_values)
        return msgspec.structs.replace(verdict, seconds=time.perf_counter() - start)


def make_verdict(outcome: Outcome[Verdict], hide_values: Callable[[str], str]) -> Verdict:
    """Return the verdict of a call, which has no reward if the call failed or gave a wrong one.

    It can be encoded, and its texts have a limited length.
    """
    verdict = _verdict(outcome)
    # Before the reason is cut off, which could leave a part of a value
    reason = make_encodable(hide_values(verdict.reason), MAX_REASON_LENGTH)
    return msgspec.structs.replace(verdict, reason=reason)


def _verdict(outcome: Outcome[Verdict]) -> Verdict:
    match outcome.ending:
        case Ending.CANCELLED:
            return _no_reward("the scorer cancelled itself")
        case Ending.TIMED_OUT:
            return _no_reward("timeout")
        case Ending.IGNORED:
            return _no_reward("timeout: the scorer ignored its cancellation")
        case Ending.LOST:
            return _no_reward(f"{LOST}: {outcome.error}")
    if outcome.error is not None:
        return _no_reward(describe_failure(outcome.error))
    try:
        return _check(outcome.value)
    except Exception as error:
        return _no_reward(describe_failure(error))


def _check(verdict: Verdict | None) -> Verdict:
    """Return the scorer's verdict after checking its types and numbers.

    Raises TypeError and `msgspec.ValidationError`.
    """
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the scorer returned {type(verdict).__name__}, not a Verdict")
    verdict = msgspec.convert(msgspec.structs.asdict(verdict), Verdict)
    if verdict.reward is None:
        return _no_reward(verdict.reason or "the scorer gave no reward")
    correctness = verdict.correctness
    if not math.isfinite(verdict.reward) or not math.isfinite(correctness or 0.0):
        return _no_reward("the scorer's reward is not finite")
    if abs(verdict.reward) > _MAX_MAGNITUDE:
        return _no_reward(f"reward {verdict.reward:g} is beyond {_MAX_MAGNITUDE:g}")
    if correctness is not None:
        correctness = _round(correctness)
        if not 0 <= correctness <= 1:
            return _no_reward(
                f"correctness {correctness:g} is not from 0 to 1. Return it as reward with "
                "correctness=None, or rescale it"
            )
    if not _is_recordable(verdict.parts):
        return _no_reward(f"the verdict's parts are not finite, or more than {_MAX_PARTS}")
    answer = verdict.answer
    return msgspec.structs.replace(
        verdict,
        reward=_round(verdict.reward),
        correctness=correctness,
        answer=None if answer is None else make_encodable(answer, _MAX_ANSWER_LENGTH),
    )


def _is_recordable(parts: Mapping[str, float]) -> bool:
    return len(parts) <= _MAX_PARTS and all(map(math.isfinite, parts.values()))


def _round(score: float) -> float:
    """Round a score. Twelve decimals first: rounding errors must not decide a tie at six."""
    return round(round(score, 2 * _DECIMALS), _DECIMALS) + 0.0  # -0.0 becomes 0.0


def _no_reward(reason: str) -> Verdict:
    return Verdict(reward=None, correctness=None, reason=reason)


def describe_failure(error: BaseException) -> str:
    """Describe an error of user-defined code. Its line comes first: the message may be long."""
    location = error_location(error)
    message = f"{type(error).__name__}: {error_text(error)}"
    if location is None or location.startswith(__file__):
        return message  # this module raised the error when it checked the verdict
    return f"{Path(location).name}: {message}"


def make_encodable(text: str, length: int) -> str:
    """Return the first characters of a text, with unpaired surrogates replaced.

    A message to rank 0 cannot encode unpaired surrogates, and should not hold megabytes.
    """
    return text[:length].encode("utf-8", "replace").decode()
