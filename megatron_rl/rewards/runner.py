"""Runs a scorer on responses as they arrive, while engines generate others."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path

import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import error_location
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.scorer import Scorer

MAX_REASON_LENGTH = 200
_MAX_ANSWER_LENGTH = 1000
# Limit of a reward's or correctness' magnitude. Larger values leave means and deviations without
# meaning.
_MAX_MAGNITUDE = 1e6


class RewardRunner:
    """Calls a scorer and checks its results.

    timeout_s: seconds for one response. A scorer that takes longer gives no reward.
    """

    def __init__(self, scorer: Scorer, *, timeout_s: float) -> None:
        self._scorer = scorer
        self._timeout_s = timeout_s

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Score one response. A failing scorer gives a verdict without a reward, with the reason.

        Any number of calls may run at the same time. Cancelling a call cancels its scorer.
        """
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                verdict = _check(await self._scorer.score(prompt, text, finish_reason))
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and deadline.expired()
            verdict = _no_reward("timeout" if timed_out else describe_failure(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            verdict = _no_reward("the scorer cancelled itself")
        return msgspec.structs.replace(verdict, seconds=time.perf_counter() - start)


def _check(verdict: Verdict) -> Verdict:
    """Return the scorer's verdict after checking its types and numbers.

    Raises TypeError and `msgspec.ValidationError`.
    """
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the scorer returned {type(verdict).__name__}, not a Verdict")
    verdict = msgspec.convert(msgspec.structs.asdict(verdict), Verdict)
    if verdict.reward is None:
        return _no_reward(verdict.reason or "the scorer gave no reward")
    # A reward model gives no correctness. Its reward is then checked alone.
    correctness = verdict.reward if verdict.correctness is None else verdict.correctness
    if not (math.isfinite(verdict.reward) and math.isfinite(correctness)):
        return _no_reward("the scorer's reward is not finite")
    if max(abs(verdict.reward), abs(correctness)) > _MAX_MAGNITUDE:
        return _no_reward(
            f"reward {verdict.reward:g} or correctness {correctness:g} is beyond {_MAX_MAGNITUDE:g}"
        )
    answer = verdict.answer
    return msgspec.structs.replace(
        verdict,
        answer=None if answer is None else make_encodable(answer, _MAX_ANSWER_LENGTH),
        reason=make_encodable(verdict.reason, MAX_REASON_LENGTH),
    )


def _no_reward(reason: str) -> Verdict:
    return Verdict(reward=None, correctness=None, reason=make_encodable(reason, MAX_REASON_LENGTH))


def describe_failure(error: Exception) -> str:
    """Describe an error of user-defined code. Its line comes first: the message may be long."""
    location = error_location(error)
    message = f"{type(error).__name__}: {error}"
    if location is None or location.startswith(__file__):
        return message  # this module raised the error when it checked the verdict
    return f"{Path(location).name}: {message}"


def make_encodable(text: str, length: int) -> str:
    """Return the first characters of a text, with unpaired surrogates replaced.

    A message to rank 0 cannot encode unpaired surrogates, and should not hold megabytes.
    """
    return text[:length].encode("utf-8", "replace").decode()
