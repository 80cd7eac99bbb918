"""The interface of everything that judges responses, and how one is opened."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Protocol

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.plugins import PluginError, load_plugin, user_code
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.exact_match import ExactMatch


class Scorer(Protocol):
    """Judges one response at a time. A scorer of the user's own may inherit this class or only have
    its methods.

    Many calls of `score` are under way at once, in one interpreter. It may await anything that can
    be cancelled. Work that can block the interpreter belongs in a child process that the scorer
    kills when it is cancelled: a thread cannot be stopped, and `reward.timeout_s` ends only what
    awaits.
    """

    def check_answer(self, answer: str) -> None:
        """Raise ValueError when no response to a question with this reference answer could be
        judged.

        It is asked once for every question, before the run starts. Inherited, it lets every
        reference pass.
        """

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Judge the decoded response `text`: a reward, and the raw correctness that zero variance
        is judged on.

        Raises when there is no verdict to give: that rollout is counted and left out of its group,
        not scored zero.
        """
        ...


def open_scorer(settings: RewardSettings) -> Scorer:
    """`exact_match`, or the user's own scorer behind `reward.name=package.module:Name`.

    Raises `PluginError`.
    """
    if settings.name == "exact_match":
        return ExactMatch(settings.answer)
    methods = {"check_answer": ("answer",), "score": ("prompt", "text", "finish_reason")}
    scorer: Scorer = load_plugin("reward.name", settings.name, settings.options, methods=methods)
    if not inspect.iscoroutinefunction(scorer.score):
        raise PluginError(
            f"reward.name={settings.name}: `score` is an ordinary function. Write `async def score`"
        )
    if inspect.iscoroutinefunction(scorer.check_answer):
        raise PluginError(
            f"reward.name={settings.name}: `check_answer` is not awaited. Write `def check_answer`"
        )
    return scorer


def open_answer_check(settings: RewardSettings) -> Callable[[str], None]:
    """`check_answer` of an opened scorer: ValueError is about the answer, anything else a
    `PluginError`.
    """
    scorer = open_scorer(settings)

    def check(answer: str) -> None:
        with user_code(
            f"reward.name={settings.name}: check_answer({answer[:80]!r})", propagate=(ValueError,)
        ):
            scorer.check_answer(answer)

    return check
