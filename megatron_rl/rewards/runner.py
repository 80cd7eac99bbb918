"""Runs a scorer on responses as they arrive, while others are still being generated."""

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

_REASON_LENGTH = 200
_ANSWER_LENGTH = 1000
# of a reward's or correctness' size: means and deviations of larger ones say nothing any more
_MOST = 1e6


class RewardRunner:
    """timeout_s: seconds a scorer may take for one response before there is no verdict."""

    def __init__(self, scorer: Scorer, *, timeout_s: float) -> None:
        self._scorer = scorer
        self._timeout_s = timeout_s

    async def judge(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Judge one response; whatever a scorer does wrong gives no verdict, with the reason.

        Any number of calls may be under way; a cancelled call cancels its scorer.
        """
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                verdict = _checked(await self._scorer.score(prompt, text, finish_reason))
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and deadline.expired()
            verdict = _none("timeout" if timed_out else _words(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            verdict = _none("the scorer cancelled itself")
        return msgspec.structs.replace(verdict, seconds=time.perf_counter() - start)


def _checked(verdict: Verdict) -> Verdict:
    """The scorer's verdict with its types checked.

    Raises TypeError and `msgspec.ValidationError`.
    """
    if not isinstance(verdict, Verdict):
        raise TypeError(f"the scorer returned {type(verdict).__name__}, not a Verdict")
    verdict = msgspec.convert(msgspec.structs.asdict(verdict), Verdict)
    if verdict.reward is None:
        return _none(verdict.reason or "the scorer gave no reward")
    correctness = (
        verdict.reward if verdict.correctness is None else verdict.correctness
    )  # None: a judge's reward
    if not (math.isfinite(verdict.reward) and math.isfinite(correctness)):
        return _none("the scorer's reward is not finite")
    if max(abs(verdict.reward), abs(correctness)) > _MOST:
        return _none(
            f"reward {verdict.reward:g} or correctness {correctness:g} is beyond {_MOST:g}"
        )
    answer = None if verdict.answer is None else _sendable(verdict.answer, _ANSWER_LENGTH)
    return msgspec.structs.replace(
        verdict, answer=answer, reason=_sendable(verdict.reason, _REASON_LENGTH)
    )


def _none(reason: str) -> Verdict:
    return Verdict(reward=None, correctness=None, reason=_sendable(reason, _REASON_LENGTH))


def _words(error: Exception) -> str:
    """The error and, in front of what may be long, the line of the user's scorer."""
    place, words = error_location(error), f"{type(error).__name__}: {error}"
    if place is None or place.startswith(__file__):  # what a scorer returned is looked at here
        return words
    return f"{Path(place).name}: {words}"


def _sendable(text: str, length: int) -> str:
    """What a message to rank 0 can hold: halves of characters cannot be encoded, and texts may be
    megabytes.
    """
    return text[:length].encode("utf-8", "replace").decode()
