"""A scorer that takes time, as a verifier or a judge does."""

from __future__ import annotations

import asyncio
import time
import zlib

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import Scorer
from megatron_rl.rewards.answers import last_number

SLOWNESS = 10.0


class Slow(Scorer):
    """Takes `seconds` for each response, and ten times as long for a share of them.

    waits: it waits for so long, as for a judge's answer, instead of using the processor.
    """

    def __init__(self, seconds: float, slow_share: float = 0.0, *, waits: bool = False) -> None:
        self._seconds = seconds
        self._slow_share = slow_share
        self._waits = waits

    def seconds_for(self, prompt: Prompt, text: str) -> float:
        """Return how long it takes for a response, the same each time."""
        place = zlib.crc32(f"{prompt.id} {prompt.token_ids} {text}".encode()) / 2**32
        return self._seconds * (SLOWNESS if place < self._slow_share else 1.0)

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        seconds = self.seconds_for(prompt, text)
        if self._waits:
            await asyncio.sleep(seconds)
        else:
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass
        correctness = float(last_number(text) == last_number(prompt.answer))
        return Verdict(reward=correctness, correctness=correctness)
