"""Interface of scorers, and the functions that open one."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import PluginError, hide_values, load_plugin, user_code
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.exact_match import ExactMatch


class Scorer(Protocol):
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

    def check_answer(self, answer: str) -> None:
        """Raise ValueError if responses cannot be scored against this reference answer.

        Called once for every question before the run starts. The inherited method accepts every
        answer.
        """

    @abstractmethod
    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Score the decoded response `text`: a reward and the raw correctness.

        An exception means that there is no reward: the rollout is counted and left out of its
        group. Its reward does not count as zero.
        """
        ...


def open_scorer(settings: RewardSettings) -> Scorer:
    """Open the scorer that `reward.name` chooses.

    `exact_match`, or `package.module:Name` for a user-defined one. Raises `PluginError`.
    """
    if settings.name == "exact_match":
        return ExactMatch(settings.answer)
    methods = {"check_answer": ("answer",), "score": ("prompt", "text", "finish_reason")}
    scorer: Scorer = load_plugin("reward.name", settings.name, settings.options, methods=methods)
    if not inspect.iscoroutinefunction(scorer.score):
        raise PluginError(
            f"reward.name={settings.name}: `score` is not asynchronous. Write `async def score`"
        )
    if inspect.iscoroutinefunction(scorer.check_answer):
        raise PluginError(
            f"reward.name={settings.name}: `check_answer` is asynchronous. Write `def check_answer`"
        )
    return scorer


def open_answer_reader(settings: RewardSettings) -> Callable[[str], str]:
    """Open the scorer, and return a function that reads reference answers as the scorer does.

    It returns equal texts for answers that `exact_match` takes for the same. What a user-defined
    scorer takes for the same is unknown: the function then returns the answer as it is written.

    It raises ValueError for an unusable answer. Any other exception of the scorer becomes a
    `PluginError`.
    """
    if settings.name == "exact_match":
        return ExactMatch(settings.answer).read_reference
    scorer = open_scorer(settings)

    def read(answer: str) -> str:
        call = f"reward.name={settings.name}: check_answer({answer[:80]!r})"
        try:
            with user_code(call, propagate=(ValueError,), options=settings.options):
                scorer.check_answer(answer)
        except ValueError as error:
            if isinstance(error, PluginError):
                raise
            raise ValueError(hide_values(str(error), settings.options)) from None
        return answer

    return read
