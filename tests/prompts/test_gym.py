import sys
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace

import pytest

from megatron_rl.prompts import gym
from megatron_rl.prompts.question import PromptDataError


def test_a_missing_library_comes_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(PromptDataError, match=r"data\.source=reasoning_gym: .*make extras"):
        gym.ReasoningGym("chain_sum", {})


def test_size_and_seed_are_not_settings() -> None:
    with pytest.raises(PromptDataError, match=r"data\.task_config: \['seed'\]"):
        gym.ReasoningGym("chain_sum", {"seed": 3})


def test_questions_are_reproducible_and_go_on_past_one_chunk() -> None:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    first = list(islice(gym.ReasoningGym("gcd", {}).questions(0), 2500))
    assert first == list(islice(gym.ReasoningGym("gcd", {}).questions(0), 2500))
    assert len({q.text for q in first}) > 2000
    assert [q.text for q in islice(gym.ReasoningGym("gcd", {}).questions(1), 50)] != [
        q.text for q in first[:50]
    ]
    assert all(q.answer.isdigit() and q.difficulty for q in first)


def test_bad_tasks_and_settings_are_named() -> None:
    pytest.importorskip("reasoning_gym", reason="optional: make extras")
    with pytest.raises(PromptDataError, match=r"data\.task=nothing: .*chain_sum"):
        gym.ReasoningGym("nothing", {})
    with pytest.raises(PromptDataError, match=r"data\.task_config=.*min_terms must be positive"):
        next(gym.ReasoningGym("chain_sum", {"min_terms": 0}).questions(0))
    with pytest.raises(PromptDataError, match="no reference answer"):
        next(gym.ReasoningGym("rubiks_cube", {}).questions(0))


def broken_items() -> Iterator[dict[str, str]]:
    yield {"question": "1+1=", "answer": "2"}
    raise IndexError("no such item")


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        (broken_items(), "IndexError: no such item"),
        (iter([{"answer": "2"}]), "KeyError: 'question'"),
    ],
)
def test_a_generator_that_fails_on_the_way_is_named(
    monkeypatch: pytest.MonkeyPatch, items: Iterator[dict[str, str]], reason: str
) -> None:
    factory = SimpleNamespace(
        DATASETS={"sums": None}, create_dataset=lambda task, **settings: items
    )
    monkeypatch.setattr(gym, "_factory", lambda: factory)
    with pytest.raises(
        PromptDataError, match=rf"data\.task=sums: .*data\.seed=7.*{reason}.*Choose another"
    ):
        list(gym.ReasoningGym("sums", {}).questions(7))
