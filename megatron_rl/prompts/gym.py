"""Questions from reasoning-gym's generators, an optional dependency.

A task may have several correct answers (`countdown`). reward=reasoning_gym accepts them all: it
scores by the entry of the task, which is in the details. For other rewards, only the reference
answer is correct, and tasks without one (`rubiks_cube`) are unusable.
"""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts.question import MAX_CHARACTERS, PromptDataError

SUPPORTED = "0.1.25"
_CHUNK = 1000
_SEED_STRIDE = 1_000_003  # a prime, so that the streams of two seeds do not overlap


class ReasoningGym:
    """One generator of reasoning-gym.

    options: its name as `task`, and its settings, without `seed` and `size`.

    Raises `PromptDataError` for an unknown task, and for `seed` or `size`.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        reserved_names = {"seed", "size"} & set(options)
        if reserved_names:
            raise PromptDataError(
                f"data.options: {sorted(reserved_names)} follow from data.seed, data.num_train "
                "and data.num_eval. Leave them out"
            )
        self._factory = _factory()
        self._task = str(options.get("task"))
        if self._task not in self._factory.DATASETS:
            names = ", ".join(sorted(self._factory.DATASETS))
            raise PromptDataError(
                f"data.options.task={self._task}: reasoning-gym has no generator of that name. "
                f"Choose one of: {names}"
            )
        self._settings = {name: value for name, value in options.items() if name != "task"}

    def questions(self, seed: int) -> Iterator[Question]:
        """Yield questions endlessly.

        Raises `PromptDataError` if the generator fails.
        """
        for chunk in itertools.count():
            # Item i of a data set is seeded with seed + i, so chunks continue one another.
            dataset = self._dataset((seed * _SEED_STRIDE + chunk * _CHUNK) % 2**31)
            try:
                for item in dataset:
                    yield _question(self._task, item)
            except PromptDataError:
                raise
            except Exception as error:  # third-party generators may raise anything
                raise PromptDataError(
                    f"data.options.task={self._task}: the generator fails with data.seed={seed} "
                    f"and the settings {self._settings} ({type(error).__name__}: {error}). Choose "
                    "another seed, other settings or another task"
                ) from error

    def _dataset(self, seed: int) -> Iterable[Mapping[str, Any]]:
        try:
            dataset: Iterable[Mapping[str, Any]] = self._factory.create_dataset(
                self._task, seed=seed, size=_CHUNK, **self._settings
            )
        except (TypeError, ValueError, AssertionError) as error:
            raise PromptDataError(
                f"data.options: the generator {self._task} refuses the settings "
                f"{self._settings}: {error}. Correct them"
            ) from error
        return dataset


def _question(task: str, item: Mapping[str, Any]) -> Question:
    text = str(item["question"])
    difficulty = item.get("metadata", {}).get("difficulty", "")
    if isinstance(difficulty, Mapping):
        difficulty = ",".join(f"{name}={value}" for name, value in sorted(difficulty.items()))
    return Question(
        id=f"{task}/{text}",
        text=text,
        answer="" if item["answer"] is None else str(item["answer"]),
        task=task,
        origin=f"reasoning_gym {task} {text[:60]!r}",
        difficulty=str(difficulty),
        details=_details(item),
    )


def _details(item: Mapping[str, Any]) -> str:
    """Return an entry as JSON text, "" for one that is too long or cannot be written so.

    Its number is left out, so that equal questions have equal details.
    """
    metadata = dict(item.get("metadata", {}))
    metadata.pop("source_index", None)
    try:
        text = json.dumps({**item, "metadata": metadata})
    except (TypeError, ValueError):
        return ""
    return text if len(text) <= MAX_CHARACTERS else ""


def _factory() -> Any:
    try:
        importlib.import_module("reasoning_gym")  # registers its data sets
        return importlib.import_module("reasoning_gym.factory")
    except ImportError as error:
        raise PromptDataError(
            f"data.source=reasoning_gym: the package cannot be imported ({error}). Install it with "
            f"`make extras`, or with `pip install reasoning-gym=={SUPPORTED}`"
        ) from error
