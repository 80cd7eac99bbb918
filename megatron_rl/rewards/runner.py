"""Runs a scorer on responses as they arrive, while others are still being generated."""

from __future__ import annotations

import asyncio
import math
import time

import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.scorer import Scorer

_REASON_LENGTH = 200


class RewardRunner:
    """timeout_s: seconds a scorer may take for one response before there is no verdict."""

    def __init__(self, scorer: Scorer, *, timeout_s: float) -> None:
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s={timeout_s}: must be above 0")
        self._scorer = scorer
        self._timeout_s = timeout_s

    async def judge(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Judge one response. Any number of calls may be under way; a cancelled call cancels its scorer."""
        start = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                verdict = await self._scorer.score(prompt, text, finish_reason)
            reason = _unusable(verdict)
        except Exception as error:
            timed_out = isinstance(error, TimeoutError) and deadline.expired()
            reason = "timeout" if timed_out else f"{type(error).__name__}: {error}"[:_REASON_LENGTH]
        seconds = time.perf_counter() - start
        if reason:
            return Verdict(reward=None, correctness=None, seconds=seconds, reason=reason)
        return msgspec.structs.replace(verdict, seconds=seconds)


def _unusable(verdict: Verdict) -> str:
    """Why a scorer's verdict cannot be trained on; empty when it can."""
    if verdict.reward is None or verdict.correctness is None:
        return verdict.reason or "the scorer gave no reward"
    if not (math.isfinite(verdict.reward) and math.isfinite(verdict.correctness)):
        return "the scorer's reward is not finite"
    return ""
