"""The queue: what a checkpoint has of groups is delivered, or continued by a collector."""

import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.credit.group_kinds import GroupKind
from megatron_rl.prompts.selection.selector import Extension
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.queue.saved_groups import SavedGroup, SavedGroups
from megatron_rl.rollouts.recording.reader import read_saved_rollout
from megatron_rl.rollouts.wire.messages import Drop, GroupRequest, Partial, Store, ToCollector
from megatron_rl.rollouts.wire.store import RolloutGone, read_rollout
from tests.support.collectors import Peer, group_done, request
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import assert_equal, make_rollout
from tests.support.saved_groups import save_group

ROLLOUT = replace(make_rollout(2, 3), sample_index=0)
REF = msgspec.structs.replace(make_ref(ROLLOUT), num_generated=3)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer, lines: list[str]) -> RolloutQueue:
    return RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=9), log=lines.append)


SaveGroup = Callable[..., SavedGroup]


@pytest.fixture
def saved_group(tmp_path: Path) -> SaveGroup:
    """Saves rollout 0 of a group, whose rollout 1 is open or rejected."""

    def save(name: str, open_samples: tuple[int, ...] = ()) -> SavedGroup:
        return save_group(tmp_path / name, group_of(name, open_samples), [ROLLOUT])

    return save


def group_of(name: str, open_samples: tuple[int, ...] = ()) -> Group:
    return Group(
        group_id=name,
        prompt=request(name).prompt,
        rollouts=(REF,),
        rejections={} if open_samples else {"engine": 1},
        rejected_tokens={"engine": 4},
        open_samples=open_samples,
    )


def receive_requests(peer: Peer) -> list[ToCollector]:
    return [message for message in peer.receive(1) if isinstance(message, GroupRequest)]


def continued(name: str, saved_group: SavedGroup) -> GroupRequest:
    """The request for a group that continues what a checkpoint has of it."""
    return msgspec.structs.replace(
        request(name), start=saved_group.group, saved=saved_group.rollouts
    )


@pytest.mark.parametrize("open_samples", [(), (1,)], ids=["finished", "open"])
def test_a_collector_reads_what_a_checkpoint_has_of_a_group(
    queue: RolloutQueue, peer: Peer, saved_group: SaveGroup, open_samples: tuple[int, ...]
) -> None:
    """Rank 0 knows where the rollouts are, and does not have them."""
    start = saved_group("a", open_samples)
    queue.restore(SavedGroups([start]))
    queue.submit([request("a"), request("b")])
    assert receive_requests(peer) == [continued("a", start), request("b")]
    (saved,) = start.rollouts
    assert_equal(read_saved_rollout(saved, "a"), replace(ROLLOUT, prompt_id="a"))
    peer.send(msgspec.structs.replace(group_done("a"), generated_tokens=9))
    peer.send(group_done("b"))
    assert len(list(queue.as_completed(lambda: None))) == 2
    assert (queue.tokens_of("a"), queue.saved_tokens_of("a")) == (9, 7)
    assert (queue.tokens_of("b"), queue.saved_tokens_of("b")) == (5, 0)
    with pytest.raises(ValueError, match="submitted already"):
        queue.submit([request("a")])


def test_groups_of_a_batch_are_read_once_they_are_needed(
    queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    """Rank 0 has them as delivered ones of a lost collector. That is no repeated request."""
    starts = [saved_group("a"), saved_group("b")]
    sampling = Sampling(max_new_tokens=9, temperature=1.0)
    queue.hold_saved(starts, sampling, 4)
    with pytest.raises(ValueError, match="submitted already"):
        queue.submit([request("a")])
    assert queue.lost_groups(["a", "b"]) == ["a", "b"]
    assert (queue.tokens_of("a"), queue.saved_tokens_of("a")) == (7, 7)
    queue.drop(["b"])
    assert queue.request_again(["a"]) == queue.num_repeated == 0
    (message,) = receive_requests(peer)
    wanted = msgspec.structs.replace(continued("a", starts[0]), sampling=sampling, num_samples=4)
    assert message == wanted
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(lambda: None))) == 1
    assert queue.lost_groups(["a", "b"]) == []
    assert queue.request_again(["a"]) == queue.num_repeated == 1
    (anew,) = receive_requests(peer)
    assert isinstance(anew, GroupRequest) and (anew.start, anew.saved) == (None, ())


def test_another_collector_gets_what_a_lost_one_had_of_the_checkpoint(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    queue.restore(SavedGroups([saved_group("a", (1,))]))
    queue.submit([request("a")])
    assert len(receive_requests(peer)) == 1
    peer.close()
    later = Peer(hub, 0, epoch=1)
    messages: list[ToCollector] = []
    deadline = time.monotonic() + 10
    while not messages and time.monotonic() < deadline:
        queue.lost_groups([])  # handles events
        messages += [m for m in later.receive() if isinstance(m, GroupRequest)]
    (again,) = messages
    assert isinstance(again, GroupRequest) and again.start is not None and again.attempt == 1
    # A group that is delivered and lost is sampled anew: other weights serve by then
    later.send(msgspec.structs.replace(group_done("a"), attempt=1))
    list(queue.as_completed(lambda: None))
    queue.request_again(["a"])
    (anew,) = receive_requests(later)
    assert isinstance(anew, GroupRequest) and anew.start is None
    later.close()


def test_what_does_not_fit_is_counted_and_sampled_anew(
    queue: RolloutQueue, peer: Peer, lines: list[str], saved_group: SaveGroup
) -> None:
    queue.restore(SavedGroups([saved_group("a")], log=lines.append))
    queue.submit([request("a", 3)])
    assert receive_requests(peer) == [request("a", 3)]
    assert queue.num_repeated == 1
    assert lines == [
        "7 tokens of group a in the checkpoint do not fit the settings of this run: the group is "
        "sampled anew"
    ]


def test_partials_are_those_of_open_requests_alone_and_are_freed(
    queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    """A group may have ended meanwhile, and an answer to an earlier save may come late."""
    queue.submit([request("a"), request("b")])
    groups = [group_of(name, (1,)) for name in ("a", "b")]
    peer.send(group_done("b"))
    peer.send(Partial(0, groups[0]))

    def answer() -> None:
        for group in (*groups, None):
            peer.send(Partial(1, group))

    timer = threading.Timer(0.2, answer)
    timer.start()
    assert queue.store_partials(timeout_seconds=10) == [groups[0]]
    assert [group.group_id for group in queue.arrived_groups({"a", "b"})] == ["b"]
    queue.release_partials()
    queue.release_partials()
    messages = [m for m in peer.receive(4) if not isinstance(m, GroupRequest)]
    assert Store(1) in messages
    releases = [message for message in messages if isinstance(message, Drop)]
    assert releases == [Drop(("partials-0/a",)), Drop(("partials-1/a", "partials-1/b"))]


def test_a_node_that_does_not_store_in_time_is_left_out(
    queue: RolloutQueue, peer: Peer, lines: list[str]
) -> None:
    queue.submit([request("a")])
    assert queue.store_partials(timeout_seconds=0.2) == []
    text = r"node\(s\) \[0\] did not store all of their open rollouts within (\d+\.\d) s"
    (seconds,) = re.findall(text, lines[-1])
    assert 0.2 <= float(seconds) < 10


def test_a_collector_that_replaces_another_during_a_save_is_not_waited_for_in_vain(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    queue.submit([request("a")])
    replacements: list[Peer] = []

    def idle() -> None:
        if not replacements:
            peer.close()
            replacements.append(Peer(hub, 0, epoch=1))
        elif any(isinstance(message, Store) for message in replacements[0].receive()):
            replacements[0].send(Partial(1, group_of("a", (0, 1))))
            replacements[0].send(Partial(1, None))

    try:
        groups = queue.store_partials(timeout_seconds=5, idle=idle)
    finally:
        for replacement in replacements:
            replacement.close()
    assert [group.group_id for group in groups] == ["a"]


def test_a_save_keeps_restored_groups_that_wait_for_a_collector(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    queue.restore(SavedGroups([saved_group("a", (1,))]))
    queue.submit([request("a")])
    hub.disconnect(0, 0, "it was killed")
    (group,) = queue.store_partials(timeout_seconds=5)
    assert (group.group_id, group.open_samples) == ("a", (1,))
    (ref,) = group.rollouts
    assert_equal(read_rollout(ref), replace(ROLLOUT, prompt_id="a"))
    queue.release_partials()
    with pytest.raises(RolloutGone):
        read_rollout(ref)
    later = Peer(hub, 0, epoch=1)
    hub.wait_for(1, 5)
    queue.lost_groups([])  # handles events
    assert len(receive_requests(later)) == 1
    later.close()


def test_a_save_keeps_restored_groups_that_their_collector_does_not_store(
    queue: RolloutQueue, peer: Peer, lines: list[str], saved_group: SaveGroup
) -> None:
    """The collector of group a hangs. It has stored what it has of group b."""
    queue.restore(SavedGroups([saved_group("a", (1,)), saved_group("b", (1,))]))
    queue.submit([request("a"), request("b"), request("c")])
    assert [group.group_id for group in queue.store_partials(timeout_seconds=0.2)] == ["a", "b"]
    assert "did not store" in lines[-1]
    queue.release_partials()
    newer_group = msgspec.structs.replace(saved_group("b", (1,)).group, rejected_tokens={})

    def idle() -> None:
        if any(isinstance(message, Store) for message in peer.receive()):
            peer.send(Partial(2, newer_group))
            peer.send(Partial(2, None))

    groups = queue.store_partials(timeout_seconds=5, idle=idle)
    assert groups[0] == newer_group
    assert [group.group_id for group in groups] == ["b", "a"]
    queue.release_partials()


def test_a_save_leaves_out_what_only_a_removed_checkpoint_had(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer, saved_group: SaveGroup, lines: list[str]
) -> None:
    start = saved_group("a", (1,))
    queue.restore(SavedGroups([start], log=lines.append))
    queue.submit([request("a")])
    hub.disconnect(0, 0, "it was killed")
    Path(start.rollouts[0].part).with_suffix(".safetensors").unlink()
    assert queue.store_partials(timeout_seconds=5) == []
    assert "group a is not saved again" in lines[-1]
    queue.release_partials()


def test_a_probe_of_a_checkpoint_that_is_sampled_again_is_not_extended_again(
    queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    """As with a probe that a collector has delivered."""
    start = saved_group("a")
    queue.restore(SavedGroups([start]))
    probe = msgspec.structs.replace(request("a"), extension=Extension(4, (GroupKind.MIXED,)))
    queue.submit([probe])
    assert receive_requests(peer) == [continued("a", start)]
    peer.send(group_done("a"))
    assert len(list(queue.as_completed(lambda: None))) == 1
    queue.request_again(["a"])
    assert receive_requests(peer) == [request("a")]


def test_partials_that_come_after_the_save_are_freed(
    queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    queue.submit([request("a")])
    queue.store_partials(timeout_seconds=0.1)
    queue.release_partials()
    peer.send(Partial(1, group_of("a", (1,))))
    deadline = time.monotonic() + 10
    releases: list[ToCollector] = []
    while not releases and time.monotonic() < deadline:
        queue.lost_groups([])  # handles events
        releases += [m for m in peer.receive() if isinstance(m, Drop)]
    assert releases == [Drop(("partials-1/a",))]


def test_groups_that_no_request_asked_for_are_dropped_with_their_tokens(
    queue: RolloutQueue, peer: Peer, saved_group: SaveGroup
) -> None:
    """Later steps are dropped. The run ends before some of them begin."""
    queue.restore(SavedGroups([saved_group("a"), saved_group("b", (1,)), saved_group("c")]))
    queue.submit([request("a")])
    assert len(receive_requests(peer)) == 1
    assert (queue.drop_saved(), queue.drop_saved()) == (14, 0)
    queue.submit([request("b"), request("c")])
    assert receive_requests(peer) == [request("b"), request("c")]
