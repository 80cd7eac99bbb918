"""The cause of a stall, by the samples of all ranks."""

from collections.abc import Mapping

import pytest

from megatron_rl.run.supervision.rank_sample import RankSample
from megatron_rl.run.supervision.stall_detector import StallDetector

SECONDS = 14.0
REDUCE = ("train.py:1 main", "torch/distributed/c10d.py:7 all_reduce")
GATHER = ("train.py:1 main", "torch/distributed/c10d.py:9 all_gather")
USER = ("train.py:1 main", "loss.py:5 my_loss")
DEVICE = ("train.py:1 main", "clip.py:3 norm")


def waiting(count: int, stack: tuple[str, ...] = REDUCE) -> RankSample:
    return RankSample(count=count, number=3, command="Train, step 2", stack=stack, is_waiting=True)


def working(count: int, stack: tuple[str, ...] = USER) -> RankSample:
    return RankSample(count=count, number=3, command="Train, step 2", stack=stack)


def detect(*moments: Mapping[int, RankSample], world_size: int = 4) -> str:
    """Observe samples every seven seconds and return the stall at the last moment."""
    detector = StallDetector(world_size, SECONDS)
    now = 100.0
    for samples in moments:
        now += 7.0
        detector.observe(samples, now)
    return detector.describe_stall(now)


def test_the_rank_that_does_not_wait_is_named_with_its_stack() -> None:
    moments = [{rank: waiting(n) for rank in (0, 1, 3)} | {2: working(n)} for n in (1, 2, 3)]
    assert detect(*moments).splitlines() == [
        "rank 2 (Train, step 2) has been at the same place for 14 s:",
        "    train.py:1 main",
        "    loss.py:5 my_loss",
        "3 other ranks wait for it",
    ]


def test_nothing_is_said_before_the_time_is_over() -> None:
    assert not detect(*({0: waiting(n), 1: working(n)} for n in (1, 2)), world_size=2)


def test_a_rank_that_moves_is_no_stall() -> None:
    moments = [
        {0: waiting(n), 1: working(n, (*USER, f"layer.py:{n} forward"))} for n in (1, 2, 3, 4)
    ]
    assert not detect(*moments, world_size=2)


def test_a_rank_in_the_next_command_has_moved() -> None:
    first = {0: waiting(1), 1: working(1)}
    second = {0: waiting(2), 1: RankSample(count=2, number=4, stack=USER)}
    assert not detect(first, first, second, world_size=2)


def test_a_rank_that_takes_no_samples_is_named_although_it_waited_last() -> None:
    moments = [{0: waiting(n), 1: waiting(1, GATHER)} for n in (1, 2, 3)]
    text = detect(*moments, world_size=2)
    assert text.startswith(
        "rank 1 (Train, step 2) has not responded for 14 s. Its last known place:"
    )
    assert text.endswith("the other rank waits for it")


def test_ranks_that_wait_at_several_places_wait_for_each_other() -> None:
    moments = [
        {rank: waiting(n, GATHER if rank == 3 else REDUCE) for rank in range(4)} for n in "123"
    ]
    text = detect(*[{r: _count(s, n) for r, s in m.items()} for n, m in enumerate(moments)])
    assert text.splitlines()[0] == "no rank moves, and the ranks are at several places:"
    assert "rank 0, 1, 2 at" in text and "rank 3 at" in text


def test_ranks_that_wait_at_one_place_are_no_stall() -> None:
    """A slow link makes all ranks wait in the same collective."""
    assert not detect(*({rank: waiting(n) for rank in range(4)} for n in (1, 2, 3, 4)))


def test_on_gpus_the_rank_apart_from_the_majority_is_named() -> None:
    moments = [
        {rank: working(n, USER if rank == 1 else DEVICE) for rank in range(4)} for n in (1, 2, 3)
    ]
    text = detect(*moments)
    assert text.startswith("rank 1 ") and text.endswith("3 other ranks wait for it")


@pytest.mark.parametrize("world_size", [2, 4])
def test_without_a_majority_all_places_are_listed(world_size: int) -> None:
    half = world_size // 2
    moments = [
        {rank: working(n, USER if rank < half else DEVICE) for rank in range(world_size)}
        for n in (1, 2, 3)
    ]
    text = detect(*moments, world_size=world_size)
    assert text.startswith("no rank moves") and "loss.py:5" in text and "clip.py:3" in text


def test_many_causes_are_counted() -> None:
    moments = [{0: waiting(n)} | {rank: working(n) for rank in range(1, 7)} for n in (1, 2, 3)]
    text = detect(*moments, world_size=7)
    assert text.count("at the same place") == 3
    assert "3 more ranks are like that" in text


def test_missing_samples_are_awaited() -> None:
    assert not detect(*({0: waiting(n)} for n in (1, 2, 3, 4)), world_size=2)


def _count(sample: RankSample, count: int) -> RankSample:
    return RankSample(
        count=count,
        number=sample.number,
        command=sample.command,
        stack=sample.stack,
        is_waiting=sample.is_waiting,
    )
