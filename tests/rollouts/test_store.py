"""Rollouts in shared memory."""

import multiprocessing
import os
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from megatron_rl.contracts.group import RolloutLocation
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.wire.store import RolloutGone, RolloutReader, RolloutStore, read_rollout
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import assert_equal, make_rollout


def test_stored_rollouts_are_read_unchanged() -> None:
    store = RolloutStore(node=0)
    rollouts = [make_rollout(4, 5), make_rollout(9, 30)]
    for rollout, location in zip(rollouts, store.put("g7", rollouts), strict=True):
        assert_equal(read_rollout(make_ref(rollout, location)), rollout)


def test_a_released_rollout_is_gone_even_if_its_descriptor_is_reused() -> None:
    store = RolloutStore(node=0)
    first = make_rollout(4, 5)
    location = store.put("g1", [first])[0]
    store.release(["g1", "unknown"])
    with pytest.raises(RolloutGone, match="g7/3"):
        read_rollout(make_ref(first, location))
    other = with_id(first, "other/0")
    assert store.put("g2", [other])[0].fd == location.fd
    with pytest.raises(RolloutGone, match="other/0"):
        read_rollout(make_ref(first, location))


def with_id(rollout: Rollout, rollout_id: str) -> Rollout:
    return Rollout(
        rollout_id,
        rollout.prompt_id,
        0,
        rollout.finish_reason,
        rollout.segments,
        np.array(rollout.routes),
    )


def test_a_group_is_stored_once() -> None:
    store = RolloutStore(node=0)
    store.put("g", [])
    with pytest.raises(ValueError, match="once"):
        store.put("g", [])


def _store_and_wait(pipe: "multiprocessing.connection.Connection") -> None:
    store = RolloutStore(node=0)
    pipe.send_bytes(msgspec.msgpack.encode(store.put("g", [make_rollout(3, 3)])[0]))
    pipe.recv_bytes()


def test_another_process_reads_a_rollout_until_its_owner_dies() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_store_and_wait, args=(theirs,))
    process.start()
    location = msgspec.msgpack.decode(ours.recv_bytes(), type=RolloutLocation)
    assert location.pid == process.pid != os.getpid()
    sample = make_ref(make_rollout(3, 3), location)
    assert_equal(read_rollout(sample), make_rollout(3, 3))
    reader = RolloutReader()
    reader.keep(sample)
    process.kill()
    process.join()
    with pytest.raises(RolloutGone):
        read_rollout(sample)
    with pytest.raises(RolloutGone, match="g7/3"):
        RolloutReader().keep(sample)
    assert_equal(reader.read(sample), make_rollout(3, 3))
    reader.close()
    with pytest.raises(RolloutGone):
        reader.read(sample)


def test_a_kept_rollout_that_is_another_one_is_gone() -> None:
    store = RolloutStore(node=0)
    rollout = make_rollout(4, 5)
    location = store.put("g1", [rollout])[0]
    reader = RolloutReader()
    reader.keep(make_ref(rollout, location))
    with pytest.raises(RolloutGone, match="other/0"):
        reader.read(make_ref(with_id(rollout, "other/0"), location))


def test_a_group_that_is_released_while_it_is_written_harms_no_other() -> None:
    """Its descriptor's number goes to the next group that is stored."""
    store = RolloutStore(node=0)
    rollouts = [with_id(make_rollout(4, 5), f"a/{index}") for index in range(3)]
    others = [with_id(make_rollout(9, 30), f"b/{index}") for index in range(3)]

    def interrupted() -> Iterator[Rollout]:
        yield rollouts[0]
        store.release(["a"])
        locations.extend(store.put("b", others))
        yield from rollouts[1:]

    locations: list[RolloutLocation] = []
    assert store.put("a", interrupted())[0].fd == locations[0].fd
    for other, location in zip(others, locations, strict=True):
        assert_equal(read_rollout(make_ref(other, location)), other)
    assert os.fstat(locations[0].fd).st_size == sum(location.nbytes for location in locations)
    store.put("a", rollouts)  # the same group is requested again
