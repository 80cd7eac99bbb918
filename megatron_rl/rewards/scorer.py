"""The interface of everything that judges responses."""

from __future__ import annotations

from typing import Protocol

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason


class Scorer(Protocol):
    """Judges one response at a time.

    `score` may await anything that can be cancelled. Work that can block the interpreter belongs in a child process
    that the scorer kills when it is cancelled: a thread cannot be stopped.
    """

    def check_answer(self, answer: str) -> None:
        """Raise ValueError when no response to a question with this reference answer could be judged."""
        ...

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Judge the decoded response `text`. Raises when there is no verdict to give."""
        ...
