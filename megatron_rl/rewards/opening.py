"""Opens the scorer that the settings choose."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.plugins import PluginError, hide_values, load_plugin, user_code
from megatron_rl.rewards.exact_match import ExactMatch
from megatron_rl.rewards.scorer import Scorer


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
