"""Opens the scorer that the settings choose."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.plugins import PluginError, hide_values, load_plugin, user_code
from megatron_rl.contracts.prompt import Question
from megatron_rl.rewards.exact_match import ExactMatch
from megatron_rl.rewards.scorer import Scorer


def open_scorer(settings: RewardSettings) -> Scorer:
    """Open the scorer that `reward.name` chooses.

    `exact_match`, or `package.module:Name` for a user-defined one. Raises `PluginError`.
    """
    if settings.name == "exact_match":
        return ExactMatch(settings.answer)
    methods = {"check_answer": ("question",), "score": ("prompt", "text", "finish_reason")}
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


def open_answer_reader(settings: RewardSettings) -> Callable[[Question], Hashable]:
    """Open the scorer, and return a function that reads reference answers as the scorer does.

    It returns equal values for answers that `exact_match` takes for the same. What another scorer
    takes for the same is unknown: the function then returns the answer and the details as they are
    written.

    It raises ValueError for an unusable answer. Any other exception of the scorer becomes a
    `PluginError`.
    """
    if settings.name == "exact_match":
        exact_match = ExactMatch(settings.answer)
        return lambda question: exact_match.read_reference(question.answer)
    scorer = open_scorer(settings)

    def read(question: Question) -> Hashable:
        call = f"reward.name={settings.name}: check_answer({question.answer[:80]!r})"
        try:
            with user_code(call, propagate=(ValueError,), options=settings.options):
                scorer.check_answer(question)
        except ValueError as error:
            if isinstance(error, PluginError):
                raise
            raise ValueError(hide_values(str(error), settings.options)) from None
        return question.answer, question.details

    return read
