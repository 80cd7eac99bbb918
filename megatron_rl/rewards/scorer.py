"""Interface of scorers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.rollout import FinishReason


class Scorer(ABC):
    """Scores one response at a time. A user-defined scorer needs both methods.

    It may inherit from this class. Calls of `score` run in a process of their own beside the
    collector, and many of them at the same time in one event loop. A call may await anything that
    can be cancelled. Work that blocks the interpreter delays all other calls: move it to a child
    process that the scorer kills on cancellation, because a thread cannot be stopped.

    Let a call end when it is cancelled: a bare `except:` would catch the cancellation. A process
    that answers nothing for `reward.timeout_s` and 6 seconds is killed and replaced, with all
    processes that it has started. The calls that ran in it are made again. docs/faults.md says how
    often, and how to limit the memory of the process.
    """

    def check_answer(self, question: Question) -> None:  # noqa: B027, may accept every answer
        """Raise ValueError if responses cannot be scored against a question's answer and details.

        Called once for every question before the run starts. The inherited method accepts every
        question.
        """

    @abstractmethod
    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Score the decoded response `text`: a reward and the raw correctness.

        An exception means that there is no reward: the rollout is counted and does not take part in
        its group. Its reward does not count as zero.
        """
