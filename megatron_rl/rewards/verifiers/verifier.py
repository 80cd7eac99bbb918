"""Base class of the verifiers: scorers of this project that judge in a process with limits."""

from __future__ import annotations

from abc import abstractmethod

import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.scorer import Scorer
from megatron_rl.rewards.verifiers.worker import Worker

_CPU_SECONDS = 2.0
_MEMORY_BYTES = 1 << 30


class _Request(msgspec.Struct, frozen=True):
    prompt: Prompt
    text: str


class Verifier(Scorer):
    """Judges a response by rules that repeat, in a process of its own with limits.

    A call that takes more than 2 s of CPU time or 1 GiB of memory raises, so that there is no
    verdict. Such a rollout leaves its group, and a policy could escape a negative advantage by
    answers that are slow to judge. A verifier therefore refuses an answer by its size, depth and
    digits before a library sees it: that answer is incorrect, always.
    """

    def __init__(self) -> None:
        self._worker = Worker(self._grade, cpu_seconds=_CPU_SECONDS, memory_bytes=_MEMORY_BYTES)

    @abstractmethod
    def check_answer(self, question: Question) -> None:
        """Raise ValueError if responses cannot be judged by a question's answer and details."""

    @abstractmethod
    def grade(self, prompt: Prompt, text: str) -> Verdict:
        """Judge a response that ended by itself. Runs in the worker."""

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Judge a response. Only a response that ended by itself can be correct.

        Raises ValueError for an aborted response, and what `Worker.call` raises.
        """
        if finish_reason is FinishReason.ABORT:
            raise ValueError("the response was aborted")
        if finish_reason is not FinishReason.STOP:
            return Verdict(reward=0.0, correctness=0.0)
        reply = await self._worker.call(msgspec.msgpack.encode(_Request(prompt, text)))
        return msgspec.msgpack.decode(reply, type=Verdict)

    def close(self) -> None:
        """End the worker."""
        self._worker.close()

    def _grade(self, request: bytes) -> bytes:
        call = msgspec.msgpack.decode(request, type=_Request)
        return msgspec.msgpack.encode(self.grade(call.prompt, call.text))
