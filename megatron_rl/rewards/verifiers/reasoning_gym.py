"""Judges answers to the tasks of reasoning-gym by the task's own score, an optional dependency.

Some of its tasks execute the answer as Python (`eval`, or sympy's `parse_expr`, which calls it).
Their answers may only be lists of data, or terms of known names. Another answer scores as none. The
tables below were read from one version, so another one is refused.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import re
from collections.abc import Mapping
from typing import Any

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.prompts.gym import SUPPORTED
from megatron_rl.rewards.answers import last_boxed
from megatron_rl.rewards.verifiers.verifier import Verifier

_MAX_CHARACTERS = 10_000
# Numbers that would take memory: fractions and decimals with large exponents, or many digits
_LARGE_NUMBER = re.compile(r"[0-9]\.?[eE][-+]?[0-9]{3}|[0-9]{300}")

# Lists of words and numbers: without a round bracket, nothing is called
_LIST = re.compile(r"\[[A-Za-z0-9_\s\[\],'\"-]*\]")
_ARITHMETIC = re.compile(r"(?:[0-9]{1,9}(?![0-9])|\*(?!\*)|[-+/()\s.])+")
# Terms with functions. Exponents are short, and none has a further exponent.
_NAME = r"(?:[a-zA-Z]|sin|cos|tan|sec|csc|cot|asin|acos|atan|sinh|cosh|tanh|exp|log|sqrt|pi|Abs)"
_POWER = (
    r"(?<!\))\*\*\s*(?:-?[0-9]{1,2}|[a-zA-Z]|\(-?[0-9]{1,2}(?:/[0-9]{1,2})?\))"
    r"|(?<=\))\*\*\s*[0-9](?![0-9])"
)
_ALGEBRA = re.compile(
    rf"(?:{_NAME}(?![A-Za-z0-9_])|(?:{_POWER})(?!\s*\*\*)|(?<![A-Za-z0-9_.])[0-9]+"
    r"(?:\.[0-9]*)?(?![A-Za-z_])|[-+/()\s]|\*(?!\*))+"
)
_MAX_TERM_CHARACTERS = 500
_MAX_TERM_DEPTH = 3  # of brackets
# Turns of a cube, which may have a number
_TURNS = re.compile(r"(?:[A-Za-z'\s,()]|[0-9]{1,2}(?![0-9]))*")
_ANSWERS: Mapping[str, re.Pattern[str]] = {
    "binary_matrix": _LIST,
    "n_queens": _LIST,
    "spiral_matrix": _LIST,
    "string_insertion": _LIST,
    "countdown": _ARITHMETIC,
    "puzzle24": _ARITHMETIC,
    "intermediate_integration": _ALGEBRA,
    "polynomial_multiplication": _ALGEBRA,
    "simple_integration": _ALGEBRA,
    "rubiks_cube": _TURNS,
}
# It executes code of its own data
_REFUSED = ("codeio", "composite")
# Their boards are tuples, which JSON has not
_WITH_TUPLES = ("arc_agi", "rearc")


class ReasoningGymVerifier(Verifier):
    """Rewards what reasoning-gym's task scores, from 0 to 1.

    The row's details are the entry of the task: question, answer and metadata, as
    data.source=reasoning_gym writes them. The answer stands in the last <answer></answer>, else in
    the last box, else it is the whole response.

    settings: of tasks by name, as in data.options. Few scores depend on them, such as puzzle24's.

    Raises ValueError if reasoning-gym is missing, or has another version.
    """

    def __init__(self, settings: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__()
        self._settings = dict(settings or {})
        self._factory = _import_factory()
        self._tasks: dict[str, Any] = {}
        for task in self._settings:
            self._open(task)

    def check_answer(self, question: Question) -> None:
        """Raise ValueError for details that are no entry of a known task."""
        try:
            self._open(_task_of(json.loads(question.details)))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"details {question.details[:80]!r} are no entry of reasoning-gym "
                f"({type(error).__name__}: {error}). Give its question, answer and metadata"
            ) from None

    def grade(self, prompt: Prompt, text: str) -> Verdict:
        """Score the answer in a response by the task of the prompt's entry."""
        entry = json.loads(prompt.details)
        task = _task_of(entry)
        if task in _WITH_TUPLES:
            entry["metadata"] = _with_tuples(entry["metadata"])
        answer = _answer_in(text)
        usable_answer = answer if _is_usable(answer, entry) else None
        score = min(max(float(self._open(task).score_answer(usable_answer, entry)), 0.0), 1.0)
        return Verdict(reward=score, correctness=score, answer=usable_answer)

    def _open(self, task: str) -> Any:
        """Return a task's data set, which has its score. Raises ValueError."""
        if task not in self._tasks:
            if task not in self._factory.DATASETS or task in _REFUSED:
                raise ValueError(f"the task {task} cannot be scored")
            settings = self._settings.get(task, {})
            self._tasks[task] = self._factory.create_dataset(task, seed=0, size=1, **settings)
        return self._tasks[task]


def _import_factory() -> Any:
    remedy = f"Install it with `make extras`, or with `pip install reasoning-gym=={SUPPORTED}`"
    try:
        importlib.import_module("reasoning_gym")  # registers its data sets
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise ValueError(f"reasoning-gym cannot be imported ({error}). {remedy}") from error
    version = importlib.metadata.version("reasoning_gym")
    if version != SUPPORTED:
        raise ValueError(f"reasoning-gym {version}: only {SUPPORTED} was read. {remedy}")
    return factory


def _task_of(entry: Mapping[str, Any]) -> str:
    return str(entry["metadata"]["source_dataset"])


def _with_tuples(value: Any) -> Any:
    """Return a value of JSON with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(inner) for key, inner in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _answer_in(text: str) -> str:
    """Return the answer of a response."""
    tags = text.rpartition("<answer>")
    if tags[1] and "</answer>" in tags[2]:
        return tags[2].partition("</answer>")[0].strip()
    return last_boxed(text) or text.strip()


def _is_usable(answer: str, entry: Mapping[str, Any]) -> bool:
    """Return True if an answer is within the limits, and its task executes only data or terms."""
    if len(answer) > _MAX_CHARACTERS or _LARGE_NUMBER.search(answer):
        return False
    if answer in (entry["answer"], *entry["metadata"].get("valid_answers", ())):
        return True  # the task compares it as text
    pattern = _ANSWERS.get(_task_of(entry))
    is_term = pattern in (_ARITHMETIC, _ALGEBRA)
    if is_term and (len(answer) > _MAX_TERM_CHARACTERS or _depth(answer) > _MAX_TERM_DEPTH):
        return False
    return pattern is None or pattern.fullmatch(answer) is not None


def _depth(text: str) -> int:
    """Return how deep round brackets are nested."""
    depth = deepest = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        deepest = max(deepest, depth)
    return deepest
