import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.contracts import Prompt
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.source import PromptSource


def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", token_ids=(i,), answer=str(i), task="t") for i in range(n)]


def source(n: int = 10, *, seed: int = 0, shuffle: bool = True) -> PromptSource:
    return PromptSource(prompts(n), prompts(2), seed=seed, shuffle=shuffle)


def test_every_prompt_comes_once_per_epoch_in_a_new_order() -> None:
    taken = source(10).take(30)
    epochs = [[p.id for p in taken[i : i + 10]] for i in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(p.id for p in prompts(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_alone() -> None:
    assert source(50).take(120) == source(50).take(120)
    assert source(50).take(50) != source(50, seed=1).take(50)
    assert source(5, shuffle=False).take(7) == prompts(5) + prompts(2)


@settings(max_examples=50, deadline=None)
@given(before=st.lists(st.integers(0, 25), max_size=5), after=st.lists(st.integers(0, 25), max_size=5))
def test_a_restored_cursor_continues_exactly(before: list[int], after: list[int]) -> None:
    running = source(10)
    for n in before:
        running.take(n)
    state = json.loads(json.dumps(running.state()))
    resumed = source(10)
    resumed.take(3)
    resumed.restore(state)
    assert [running.take(n) for n in after] == [resumed.take(n) for n in after]


def test_how_prompts_are_taken_does_not_change_them() -> None:
    one, many = source(10), source(10)
    assert one.take(25) == [p for n in (1, 9, 3, 0, 12) for p in many.take(n)]


@pytest.mark.parametrize("other", [source(11), source(10, seed=1), source(10, shuffle=False)])
def test_the_cursor_of_other_data_is_refused(other: PromptSource) -> None:
    with pytest.raises(PromptDataError, match="belongs to other prompts"):
        source(10).restore(other.state())


@pytest.mark.parametrize("damage", [{"epoch": -1}, {"position": "x"}, {"position": -3}, {"extra": 1}])
def test_a_damaged_cursor_is_refused(damage: dict[str, int | str]) -> None:
    state = source(10).state()
    with pytest.raises(PromptDataError, match="damaged"):
        source(10).restore({**state, **damage})
    with pytest.raises(PromptDataError, match="damaged"):
        source(10).restore({})


def test_no_training_prompt_is_an_error() -> None:
    with pytest.raises(PromptDataError, match="no usable training prompt"):
        PromptSource([], prompts(2), seed=0)
