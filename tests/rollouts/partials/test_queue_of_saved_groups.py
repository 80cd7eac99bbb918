"""The queue: what a checkpoint has of groups is delivered, or continued by a collector."""

import re
import threading
import time
from dataclasses import replace

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group
from megatron_rl.credit.group_kinds import GroupKind
from megatron_rl.prompts.selection.extension import Extension
from megatron_rl.rollouts import codec
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.messages import (
    GroupRequest,
    Partials,
    Release,
    SavedRollout,
    StorePartials,
    ToCollector,
)
from megatron_rl.rollouts.partials.saved_groups import SavedGroup, SavedGroups
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.store import RolloutGone, RolloutStore, read_rollout
from tests.support.collectors import Peer, group_done, request
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import make_rollout

ROLLOUT = replace(make_rollout(2, 3), sample_index=0)
REF = msgspec.structs.replace(make_ref(ROLLOUT), num_generated=3)


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer, lines: list[str]) -> RolloutQueue:
    return RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=9), log=lines.append)


def saved_group(name: str, open_samples: tuple[int, ...] = ()) -> SavedGroup:
    """Rollout 0 of a group, whose rollout 1 is open or rejected."""
    group = Group(
        group_id=name,
        prompt=request(name).prompt,
        rollouts=(REF,),
        rejections={} if open_samples else {"engine": 1},
        rejected_tokens={"engine": 4},
        open_samples=open_samples,
    )
    return SavedGroup(group, [ROLLOUT])


def receive_requests(peer: Peer) -> list[ToCollector]:
    kinds = (GroupRequest, SavedRollout)
    return [message for message in peer.receive(1) if isinstance(message, kinds)]


def test_a_finished_group_is_delivered_and_nobody_is_asked(queue: RolloutQueue, peer: Peer) -> None:
    store = RolloutStore(node=0)
    queue.restore(SavedGroups([saved_group("a")], store))
    queue.submit([request("a")])
    (group,) = queue.as_completed(lambda: None)
    assert (group.group_id, group.rejections) == ("a", {"engine": 1})
    (ref,) = group.rollouts
    assert codec.encode(read_rollout(ref)) == codec.encode(ROLLOUT)
    assert (queue.tokens_of("a"), queue.saved_tokens_of("a")) == (7, 7)
    assert queue.lost_groups(["a"]) == []
    assert receive_requests(peer) == []
    with pytest.raises(ValueError, match="submitted already"):
        queue.submit([request("a")])
    queue.release(["a"])
    with pytest.raises(RolloutGone):
        read_rollout(ref)


def test_an_open_group_goes_to_a_collector_with_its_rollouts(
    queue: RolloutQueue, peer: Peer
) -> None:
    partial = saved_group("a", (1,))
    queue.restore(SavedGroups([partial]))
    queue.submit([request("a"), request("b")])
    rollout, first, second = receive_requests(peer)
    assert rollout == SavedRollout("a", 0, codec.encode(ROLLOUT))
    assert first == msgspec.structs.replace(request("a"), start=partial.group)
    assert second == request("b")
    peer.send(msgspec.structs.replace(group_done("a"), generated_tokens=9))
    peer.send(group_done("b"))
    assert len(list(queue.as_completed(lambda: None))) == 2
    assert (queue.tokens_of("a"), queue.saved_tokens_of("a")) == (9, 7)
    assert (queue.tokens_of("b"), queue.saved_tokens_of("b")) == (5, 0)


def test_another_collector_gets_what_a_lost_one_had_of_the_checkpoint(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.restore(SavedGroups([saved_group("a", (1,))]))
    queue.submit([request("a")])
    assert len(receive_requests(peer)) == 2
    peer.close()
    later = Peer(hub, 0, epoch=1)
    messages: list[ToCollector] = []
    deadline = time.monotonic() + 10
    while len(messages) < 2 and time.monotonic() < deadline:
        queue.lost_groups([])  # handles events
        messages += [m for m in later.receive() if isinstance(m, GroupRequest | SavedRollout)]
    rollout, again = messages
    assert isinstance(rollout, SavedRollout)
    assert isinstance(again, GroupRequest) and again.start is not None and again.attempt == 1
    # A group that is delivered and lost is sampled anew: other weights serve by then
    later.send(msgspec.structs.replace(group_done("a"), attempt=1))
    list(queue.as_completed(lambda: None))
    queue.request_again(["a"])
    (anew,) = receive_requests(later)
    assert isinstance(anew, GroupRequest) and anew.start is None
    later.close()


def test_what_does_not_fit_is_counted_and_sampled_anew(
    queue: RolloutQueue, peer: Peer, lines: list[str]
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
    queue: RolloutQueue, peer: Peer
) -> None:
    """A group may have ended meanwhile, and an answer to an earlier save may come late."""
    queue.submit([request("a"), request("b")])
    groups = [saved_group(name, (1,)).group for name in ("a", "b")]
    peer.send(group_done("b"))
    peer.send(Partials(0, (groups[0],)))
    timer = threading.Timer(0.2, lambda: peer.send(Partials(1, tuple(groups))))
    timer.start()
    assert queue.store_partials(timeout_seconds=10) == [groups[0]]
    assert [group.group_id for group in queue.arrived_groups({"a", "b"})] == ["b"]
    queue.release_partials()
    queue.release_partials()
    messages = [m for m in peer.receive(4) if not isinstance(m, GroupRequest)]
    assert StorePartials(1) in messages
    releases = [message for message in messages if isinstance(message, Release)]
    assert releases == [Release(("partials-0/a",)), Release(("partials-1/a", "partials-1/b"))]


def test_a_node_that_does_not_store_in_time_is_left_out(
    queue: RolloutQueue, peer: Peer, lines: list[str]
) -> None:
    queue.submit([request("a")])
    assert queue.store_partials(timeout_seconds=0.2) == []
    text = r"node\(s\) \[0\] did not store their open rollouts within (\d+\.\d) s"
    (seconds,) = re.findall(text, lines[-1])
    assert 0.2 <= float(seconds) < 10


def test_a_collector_that_replaces_another_during_a_save_is_not_waited_for_in_vain(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    replacements: list[Peer] = []

    def idle() -> None:
        if not replacements:
            peer.close()
            replacements.append(Peer(hub, 0, epoch=1))
        elif any(isinstance(message, StorePartials) for message in replacements[0].receive()):
            replacements[0].send(Partials(1, (saved_group("a", (0, 1)).group,)))

    try:
        groups = queue.store_partials(timeout_seconds=5, idle=idle)
    finally:
        for replacement in replacements:
            replacement.close()
    assert [group.group_id for group in groups] == ["a"]


def test_a_save_keeps_restored_groups_that_wait_for_a_collector(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.restore(SavedGroups([saved_group("a", (1,))], RolloutStore(node=0)))
    queue.submit([request("a")])
    hub.disconnect(0, 0, "it was killed")
    (group,) = queue.store_partials(timeout_seconds=5)
    assert (group.group_id, group.open_samples) == ("a", (1,))
    (ref,) = group.rollouts
    assert codec.encode(read_rollout(ref)) == codec.encode(ROLLOUT)
    queue.release_partials()
    with pytest.raises(RolloutGone):
        read_rollout(ref)
    later = Peer(hub, 0, epoch=1)
    hub.wait_for(1, 5)
    queue.lost_groups([])  # handles events
    assert len(receive_requests(later)) == 2
    later.close()


def test_a_save_keeps_restored_groups_that_their_collector_does_not_store(
    queue: RolloutQueue, peer: Peer, lines: list[str]
) -> None:
    """The collector of group a hangs. It has stored what it has of group b."""
    queue.restore(
        SavedGroups([saved_group("a", (1,)), saved_group("b", (1,))], RolloutStore(node=0))
    )
    queue.submit([request("a"), request("b"), request("c")])
    assert [group.group_id for group in queue.store_partials(timeout_seconds=0.2)] == ["a", "b"]
    assert "did not store" in lines[-1]
    queue.release_partials()
    newer_group = msgspec.structs.replace(saved_group("b", (1,)).group, rejected_tokens={})

    def idle() -> None:
        if any(isinstance(message, StorePartials) for message in peer.receive()):
            peer.send(Partials(2, (newer_group,)))

    groups = queue.store_partials(timeout_seconds=5, idle=idle)
    assert groups[0] == newer_group
    assert [group.group_id for group in groups] == ["b", "a"]
    queue.release_partials()


def test_a_probe_of_a_checkpoint_that_is_sampled_again_is_not_extended_again(
    queue: RolloutQueue, peer: Peer
) -> None:
    """As with a probe that a collector has delivered."""
    queue.restore(SavedGroups([saved_group("a")]))
    probe = msgspec.structs.replace(request("a"), extension=Extension(4, (GroupKind.MIXED,)))
    queue.submit([probe])
    assert len(list(queue.as_completed(lambda: None))) == 1
    queue.request_again(["a"])
    assert receive_requests(peer) == [request("a")]


def test_partials_that_come_after_the_save_are_freed(queue: RolloutQueue, peer: Peer) -> None:
    queue.submit([request("a")])
    queue.store_partials(timeout_seconds=0.1)
    queue.release_partials()
    peer.send(Partials(1, (saved_group("a", (1,)).group,)))
    deadline = time.monotonic() + 10
    releases: list[ToCollector] = []
    while not releases and time.monotonic() < deadline:
        queue.lost_groups([])  # handles events
        releases += [m for m in peer.receive() if isinstance(m, Release)]
    assert releases == [Release(("partials-1/a",))]


def test_groups_that_no_request_asked_for_are_dropped_with_their_tokens(
    queue: RolloutQueue, peer: Peer
) -> None:
    """A rollback drops later steps. The run ends before some of them begin."""
    queue.restore(SavedGroups([saved_group("a"), saved_group("b", (1,)), saved_group("c")]))
    queue.submit([request("a")])
    assert (queue.drop_saved(), queue.drop_saved()) == (14, 0)
    queue.submit([request("b"), request("c")])
    assert receive_requests(peer) == [request("b"), request("c")]
