import hashlib
import tracemalloc
from collections import Counter

import pytest

from megatron_rl.config.schema import DataSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.prompts.question import PromptDataError
from megatron_rl.prompts.source import PromptSource


def make_prompts(n: int) -> list[Prompt]:
    return [Prompt(id=f"p{i}", token_ids=(i,), answer=str(i), task="t") for i in range(n)]


def make_source(n: int = 10, *, seed: int = 0, shuffle: bool = True) -> PromptSource:
    settings = DataSettings(source="column_addition", seed=seed, shuffle=shuffle)
    return PromptSource(make_prompts(n), make_prompts(2), settings)


def ids_of(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


def offer(source: PromptSource, *ids_of_step: str) -> tuple[str, int]:
    """Id and epoch of the next offer."""
    result = source.offer(ids_of_step)
    assert result is not None
    prompt, epoch = result
    return prompt.id, epoch


def test_every_prompt_comes_once_per_epoch_in_a_new_order() -> None:
    source = make_source(10)
    epochs = [ids_of(source.take(10)) for _ in range(3)]
    assert all(sorted(epoch) == ids_of(make_prompts(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_seed_alone() -> None:
    source = make_source(50)
    same_source = make_source(50)
    assert [source.take(40) for _ in range(3)] == [same_source.take(40) for _ in range(3)]
    assert make_source(50).take(50) != make_source(50, seed=1).take(50)


def test_without_shuffling_prompts_keep_their_order() -> None:
    source = make_source(5, shuffle=False)
    assert source.take(4) + source.take(3) == make_prompts(5) + make_prompts(2)


@pytest.mark.parametrize("n", [1, 3, 7, 10, 16, 19, 20])
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_take_has_no_prompt_twice_and_all_come_equally_often(n: int, shuffle: bool) -> None:
    source = make_source(20, shuffle=shuffle)
    counts: Counter[str] = Counter()
    for _ in range(200):
        ids = ids_of(source.take(n))
        assert len(ids) == len(set(ids)) == n
        counts.update(ids)
        values = [counts[prompt.id] for prompt in source.train]
        assert max(values) - min(values) <= 2, "one epoch, and prompts postponed to the next take"


def test_more_prompts_than_there_are_cannot_be_taken() -> None:
    words = r"rollout\.prompts_per_step=11: .*only 10 usable .* Lower it"
    with pytest.raises(PromptDataError, match=words):
        make_source(10).take(11)


def test_the_size_of_takes_does_not_change_an_epoch() -> None:
    source = make_source(10)
    parts = [prompt for n in (1, 5, 0, 4) for prompt in source.take(n)]
    assert parts == make_source(10).take(10)


def test_each_prompt_is_offered_once_per_epoch() -> None:
    source = make_source(10)
    offers = []
    for _ in range(6):
        source.begin_step()
        offers += [offer(source) for _ in range(5)]
    assert [epoch for _, epoch in offers] == [0] * 10 + [1] * 10 + [2] * 10
    assert len(set(offers)) == 30


def test_prompts_that_a_step_has_already_come_first_in_the_next_step() -> None:
    source = make_source(3, shuffle=False)
    assert ids_of(source.take(2)) == ["p0", "p1"]
    source.begin_step()
    assert offer(source) == ("p2", 0)
    assert offer(source, "p2") == ("p0", 1)
    assert offer(source, "p0", "p2") == ("p1", 1)
    # p2 of epoch 1 and p0 of epoch 2 are postponed.
    assert offer(source, "p0", "p2") == ("p1", 2)
    assert source.offer(("p0", "p1", "p2")) is None
    copy = make_source(3, shuffle=False)
    copy.seek(source.cursor)
    for each in (source, copy):
        assert ids_of(each.take(2)) == ["p2", "p0"]
    assert source.cursor == copy.cursor


def test_a_step_of_many_epochs_postpones_each_prompt_once() -> None:
    source = make_source(4)
    for _ in range(5):
        source.begin_step()
        ids = [offer(source)[0]]
        ids.append(offer(source, *ids)[0])
        for _ in range(18):
            offer(source, *ids)
        postponed_indices = source.cursor.postponed_indices
        assert len(postponed_indices) == len(set(postponed_indices)) <= 2


def test_a_resumed_run_takes_the_prompts_of_an_uninterrupted_one_in_every_epoch() -> None:
    whole_run = make_source(10)
    steps = [ids_of(whole_run.take(3)) for _ in range(12)]
    for num_steps in range(12):
        source = make_source(10)
        for _ in range(num_steps):
            source.take(3)
        resumed_source = make_source(10)
        resumed_source.seek(source.cursor)
        assert [ids_of(resumed_source.take(3)) for _ in range(12 - num_steps)] == steps[num_steps:]


def test_prompts_are_hashed_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_source(10)
    cursor = source.cursor
    monkeypatch.setattr(
        "megatron_rl.prompts.source.hashlib.sha256", lambda _: pytest.fail("prompts are read again")
    )
    source.take(3)
    assert source.cursor.digest == cursor.digest
    source.seek(cursor)
    assert source.cursor == cursor


def test_the_digest_is_that_of_seed_order_ids_and_tokens() -> None:
    lines = "".join(f"\np{i}\t({i},)" for i in range(10))
    expectation = hashlib.sha256(f"3/True{lines}".encode()).hexdigest()
    assert make_source(10, seed=3).cursor.digest == expectation


@pytest.mark.slow
def test_the_digest_needs_no_memory_for_all_tokens() -> None:
    prompts = [
        Prompt(id=str(i), token_ids=tuple(range(300)), answer="", task="t") for i in range(1000)
    ]
    source = PromptSource(prompts, prompts[:1], DataSettings(source="column_addition"))
    tracemalloc.start()
    assert source.cursor.digest
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 200_000, "bytes; the text of all tokens has 1.4 MB"


def test_a_cursor_of_other_prompts_is_refused() -> None:
    cursor = make_source(9).cursor
    words = (
        r"run\.resume: .*other training prompts than the 10 here\..*rows have `messages`.*"
        r"another version.*Resume with that version, or export the checkpoint"
    )
    with pytest.raises(PromptDataError, match=words):
        make_source(10).seek(cursor)
