import multiprocessing
import os

import msgspec
import numpy as np
import pytest

from launch.testbed.rollout_refs import make_ref
from megatron_rl.contracts.group import RolloutLocation
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.store import RolloutGone, RolloutStore, read_rollout
from tests.support.rollouts import assert_equal, make_rollout


def test_rollouts_are_read_back_whole() -> None:
    store = RolloutStore(node=0)
    rollouts = [make_rollout(4, 5), make_rollout(9, 30)]
    for rollout, location in zip(rollouts, store.put("g7", rollouts), strict=True):
        assert_equal(read_rollout(make_ref(rollout, location)), rollout)


def test_a_released_rollout_is_gone_and_its_file_descriptor_reuse_is_noticed() -> None:
    store = RolloutStore(node=0)
    first = make_rollout(4, 5)
    location = store.put("g1", [first])[0]
    store.release(["g1", "unknown"])
    with pytest.raises(RolloutGone, match="g7/3"):
        read_rollout(make_ref(first, location))
    other = renamed(first, "other/0")
    assert store.put("g2", [other])[0].fd == location.fd
    with pytest.raises(RolloutGone, match="other/0"):
        read_rollout(make_ref(first, location))


def renamed(rollout: Rollout, rollout_id: str) -> Rollout:
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


def _hold(pipe: "multiprocessing.connection.Connection") -> None:
    store = RolloutStore(node=0)
    pipe.send_bytes(msgspec.msgpack.encode(store.put("g", [make_rollout(3, 3)])[0]))
    pipe.recv_bytes()


def test_another_process_reads_it_and_its_death_frees_it() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(theirs,))
    process.start()
    location = msgspec.msgpack.decode(ours.recv_bytes(), type=RolloutLocation)
    assert location.pid == process.pid != os.getpid()
    sample = make_ref(make_rollout(3, 3), location)
    assert_equal(read_rollout(sample), make_rollout(3, 3))
    process.kill()
    process.join()
    with pytest.raises(RolloutGone):
        read_rollout(sample)
