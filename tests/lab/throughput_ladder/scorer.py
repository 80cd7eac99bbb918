"""A scorer that takes processor time, as a verifier does."""

from __future__ import annotations

import time

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import Scorer


class Working(Scorer):
    """Works for `seconds` on each response."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            pass
        return Verdict(reward=1.0, correctness=1.0)
