"""Opens the scorer that the settings choose."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.plugins import PluginError, hide_values, load_plugin, user_code
from megatron_rl.contracts.prompt import Question, ReadAnswer, answer_as_written
from megatron_rl.rewards.exact_match import ExactMatch
from megatron_rl.rewards.scorer import Scorer

# Imported when they are chosen, because they import libraries that need seconds and memory
_CLASSES: Mapping[str, str] = {
    "math": "megatron_rl.rewards.verifiers.math:MathVerifier",
    "choice": "megatron_rl.rewards.verifiers.choice:ChoiceVerifier",
    "json_schema": "megatron_rl.rewards.verifiers.json_schema:JsonSchemaVerifier",
    "instructions": "megatron_rl.rewards.verifiers.instructions:InstructionsVerifier",
    "reasoning_gym": "megatron_rl.rewards.verifiers.reasoning_gym:ReasoningGymVerifier",
    "unit_tests": "megatron_rl.rewards.verifiers.unit_tests:UnitTests",
    "remote": "megatron_rl.rewards.remote:RemoteScorer",
}


def open_scorer(settings: RewardSettings, key: str = "reward.name") -> Scorer:
    """Open one scorer: `exact_match`, a verifier, `remote`, or `package.module:Name`.

    key: of its name, for messages. Raises `PluginError`.
    """
    if settings.name == "exact_match":
        return ExactMatch(settings.answer)
    name = _CLASSES.get(settings.name, settings.name)
    methods = {"check_answer": ("question",), "score": ("prompt", "text", "finish_reason")}
    scorer: Scorer = load_plugin(key, name, settings.options, methods=methods)
    if not inspect.iscoroutinefunction(scorer.score):
        raise PluginError(
            f"{key}={settings.name}: `score` is not asynchronous. Write `async def score`"
        )
    if inspect.iscoroutinefunction(scorer.check_answer):
        raise PluginError(
            f"{key}={settings.name}: `check_answer` is asynchronous. Write `def check_answer`"
        )
    return scorer


def open_answer_reader(settings: RewardSettings) -> ReadAnswer:
    """Open the scorers, and return a function that reads reference answers as the scorers do.

    It returns equal values for answers that `exact_match` takes for the same. What another scorer
    takes for the same is unknown: the function then returns the answer and the details as they are
    written. With several scorers, all that score the question's task have to take two answers for
    the same.

    It raises ValueError for an unusable answer, and for a task that no scorer scores. Any other
    exception of a scorer becomes a `PluginError`.
    """
    if settings.name != "parts":
        return _open_reader(settings, "reward.name")
    readers = {
        name: _open_reader(settings.of_part(name), f"reward.parts.{name}.name")
        for name in settings.parts
    }

    def read(question: Question) -> Hashable:
        parts = [name for name, part in settings.parts.items() if part.scores(question.task)]
        if not any(settings.parts[name].share for name in parts):
            raise ValueError(
                f"the row has the task {question.task!r}, and no part of reward.parts with a "
                "weight scores it. Add the task to a part, or leave out a part's tasks"
            )
        return tuple(readers[name](question) for name in parts)

    return read


def _open_reader(settings: RewardSettings, key: str) -> ReadAnswer:
    if settings.name == "exact_match":
        exact_match = ExactMatch(settings.answer)
        return lambda question: exact_match.read_reference(question.answer)
    scorer = open_scorer(settings, key)

    def read(question: Question) -> Hashable:
        call = f"{key}={settings.name}: check_answer({question.answer[:80]!r})"
        try:
            with user_code(call, propagate=(ValueError,), options=settings.options):
                scorer.check_answer(question)
        except ValueError as error:
            if isinstance(error, PluginError):
                raise
            raise ValueError(hide_values(str(error), settings.options)) from None
        return answer_as_written(question)

    return read
