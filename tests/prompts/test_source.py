from collections import Counter

import pytest

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.source import PromptSource


def prompts(n: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", token_ids=(i,), answer=str(i), task="t") for i in range(n)]


def source(n: int = 10, *, seed: int = 0, shuffle: bool = True) -> PromptSource:
    settings = DataSettings(source="column_addition", seed=seed, shuffle=shuffle)
    return PromptSource(prompts(n), prompts(2), settings)


def test_every_prompt_comes_once_per_epoch_in_a_new_order() -> None:
    running = source(10)
    epochs = [[p.id for p in running.take(10)] for _ in range(3)]
    assert all(sorted(epoch) == sorted(p.id for p in prompts(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_alone() -> None:
    one, other = source(50), source(50)
    assert [one.take(40) for _ in range(3)] == [other.take(40) for _ in range(3)]
    assert source(50).take(50) != source(50, seed=1).take(50)
    in_order = source(5, shuffle=False)
    assert in_order.take(4) + in_order.take(3) == prompts(5) + prompts(2)


@pytest.mark.parametrize("n", [1, 3, 7, 10, 16, 19, 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_no_prompt_comes_twice_in_one_take_and_all_come_equally_often(
    n: int, shuffle: bool
) -> None:
    running = source(20, shuffle=shuffle)
    drawn: Counter[str] = Counter()
    for _ in range(200):
        ids = [p.id for p in running.take(n)]
        assert len(ids) == len(set(ids)) == n
        drawn.update(ids)
        counts = [drawn[p.id] for p in running.train]
        assert max(counts) - min(counts) <= 2, (
            "one epoch, and those that were put off to the next take"
        )


def test_more_prompts_than_there_are_cannot_be_taken() -> None:
    with pytest.raises(
        PromptDataError, match=r"rollout\.prompts_per_step=11: .*only 10 usable .* Lower it"
    ):
        source(10).take(11)


def test_how_an_epoch_is_taken_does_not_change_it() -> None:
    one, many = source(10), source(10)
    assert one.take(10) == [p for n in (1, 5, 0, 4) for p in many.take(n)]


def test_each_prompt_is_offered_once_per_epoch_however_few_are_asked() -> None:
    running = source(10)
    offered: list[tuple[str, int]] = []
    for _ in range(6):
        running.begin_step()
        for _ in range(5):
            prompt, epoch = running.offer(()) or pytest.fail("there are ten")
            offered.append((prompt.id, epoch))
    assert [epoch for _, epoch in offered] == [0] * 10 + [1] * 10 + [2] * 10
    assert len(set(offered)) == 30


def test_a_prompt_that_a_step_has_asked_is_offered_first_in_the_next_one() -> None:
    running, resumed = source(3, shuffle=False), source(3, shuffle=False)
    assert [p.id for p in running.take(2)] == ["p0", "p1"]
    running.begin_step()
    asked = {"p2"}
    assert running.offer(()) is not None  # p2 itself
    assert running.offer(asked) == (prompts(3)[0], 1) and running.offer(asked | {"p0"}) == (
        prompts(3)[1],
        1,
    )
    assert running.offer({"p0", "p2"}) == (prompts(3)[1], 2), (
        "p2 of epoch 1 and p0 of epoch 2 are put off"
    )
    assert running.offer({"p0", "p1", "p2"}) is None
    resumed.seek(running.cursor)
    for each in (running, resumed):
        assert [p.id for p in each.take(2)] == ["p2", "p0"]
    assert running.cursor == resumed.cursor


def test_steps_of_many_epochs_put_off_no_prompt_more_than_once() -> None:
    running = source(4)
    for _ in range(5):
        running.begin_step()
        asked: set[str] = set()
        for turn in range(20):
            prompt, _ = running.offer(asked) or pytest.fail("there are four")
            if turn < 2:
                asked.add(prompt.id)
        assert len(running.cursor.postponed_indices) == len(set(running.cursor.postponed_indices)) <= 2


def test_a_cursor_is_cheap_however_many_prompts_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    running = source(10)
    before = running.cursor
    monkeypatch.setattr(
        "megatron_rl.prompts.source.hashlib.sha256", lambda _: pytest.fail("prompts are read again")
    )
    running.take(3)
    assert running.cursor.digest == before.digest
    running.seek(before)
    assert running.cursor == before
