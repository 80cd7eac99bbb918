import sys
from collections.abc import Iterator
from itertools import islice
from types import ModuleType
from typing import Any

import pytest

from megatron_rl.prompts import gym
from megatron_rl.prompts.question import PromptDataError


def test_a_missing_library_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(PromptDataError, match=r"data\.source=reasoning_gym: .*make extras"):
        gym.ReasoningGym({"task": "chain_sum"})


def test_size_and_seed_are_refused() -> None:
    with pytest.raises(PromptDataError, match=r"data\.options: \['seed'\]"):
        gym.ReasoningGym({"task": "chain_sum", "seed": 3})


def test_questions_are_reproducible_beyond_one_chunk() -> None:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    questions = list(islice(gym.ReasoningGym({"task": "gcd"}).questions(0), 2500))
    assert questions == list(islice(gym.ReasoningGym({"task": "gcd"}).questions(0), 2500))
    texts = [question.text for question in questions]
    assert len(set(texts)) > 2000
    other_seed = islice(gym.ReasoningGym({"task": "gcd"}).questions(1), 50)
    assert [question.text for question in other_seed] != texts[:50]
    assert all(question.answer.isdigit() and question.difficulty for question in questions)


def first_question(task: str, settings: dict[str, Any]) -> None:
    next(gym.ReasoningGym({"task": task} | settings).questions(0))


@pytest.mark.parametrize(
    ("task", "settings", "words"),
    [
        ("nothing", {}, r"data\.options\.task=nothing: .*chain_sum"),
        ("chain_sum", {"min_terms": 0}, r"data\.options: .*min_terms must be positive"),
    ],
)
def test_unusable_tasks_and_settings_are_named(
    task: str, settings: dict[str, Any], words: str
) -> None:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    with pytest.raises(PromptDataError, match=words):
        first_question(task, settings)


def failing_items() -> Iterator[dict[str, str]]:
    yield {"question": "1+1=", "answer": "2"}
    raise IndexError("no such item")


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (failing_items(), "IndexError: no such item"),
        (iter([{"answer": "2"}]), "KeyError: 'question'"),
    ],
)
def test_a_generator_that_fails_is_named(
    monkeypatch: pytest.MonkeyPatch, items: Iterator[dict[str, str]], reason: str
) -> None:
    factory: Any = ModuleType("reasoning_gym.factory")
    factory.DATASETS = {"sums": None}
    factory.create_dataset = lambda task, **settings: items
    monkeypatch.setitem(sys.modules, "reasoning_gym", ModuleType("reasoning_gym"))
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", factory)
    words = rf"data\.options\.task=sums: .*data\.seed=7.*{reason}.*Choose another"
    with pytest.raises(PromptDataError, match=words):
        list(gym.ReasoningGym({"task": "sums"}).questions(7))
