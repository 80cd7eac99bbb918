"""Engines that are lent to collectors of other nodes, with simulated collectors."""

import time
from collections.abc import Iterator

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.messages import (
    AddEngine,
    EngineLeftOut,
    Release,
    RemoveEngine,
    SetVersion,
    Withdraw,
)
from megatron_rl.rollouts.queue import RolloutQueue
from sglang_bridge.engine import Engine
from tests.support.collectors import Observer, Peer, group_done, request, requested_ids

A_ENGINE = Engine(url="http://a:1", node=0)
B_ENGINE = Engine(url="http://b:1", node=1)


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer) -> RolloutQueue:
    return RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=1))


def idle() -> None:
    pass


@pytest.fixture
def other(hub: CollectorHub, peer: Peer) -> Iterator[Peer]:
    """The collector of node 1."""
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    yield other
    other.close()


@pytest.fixture
def lending_queue(queue: RolloutQueue, peer: Peer, other: Peer) -> RolloutQueue:
    """Node 0 has begun with group a when its only engine leaves. Node 1 has begun with group b."""
    queue.add_engine(A_ENGINE)
    queue.add_engine(B_ENGINE)
    queue.submit([request("a"), request("b")])
    assert requested_ids(peer, 2) == ["a"]
    assert requested_ids(other, 2) == ["b"]
    queue.remove_engine(A_ENGINE.url)
    assert peer.receive(2) == [RemoveEngine(A_ENGINE.url), AddEngine(B_ENGINE)]
    return queue


def test_a_collector_whose_last_engine_leaves_goes_on_with_those_of_other_nodes(
    lending_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    """Its requests stay where they are. New ones go to nodes that have engines."""
    lending_queue.submit([request("c")])
    assert requested_ids(other, 1) == ["c"]
    assert peer.receive() == []
    peer.send(group_done("a"))
    other.send(group_done("b"))
    other.send(group_done("c"))
    groups = list(lending_queue.as_completed(idle))
    assert sorted(group.group_id for group in groups) == ["a", "b", "c"]
    assert lending_queue.num_repeated == 0


def test_a_lent_engine_that_leaves_is_taken_from_all_collectors(
    lending_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    lending_queue.remove_engine(B_ENGINE.url)
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]
    assert other.receive(1) == [RemoveEngine(B_ENGINE.url)]
    lending_queue.add_engine(B_ENGINE)
    assert peer.receive(1) == [AddEngine(B_ENGINE)]
    assert other.receive(1) == [AddEngine(B_ENGINE)]


def test_a_lent_engine_that_is_added_again_is_added_for_all_collectors(
    lending_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    lending_queue.add_engine(B_ENGINE)
    assert peer.receive(1) == [AddEngine(B_ENGINE)]
    assert other.receive(1) == [AddEngine(B_ENGINE)]


def test_a_collector_that_replaces_a_lost_one_gets_lent_engines_again(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.add_engine(B_ENGINE)
    queue.submit([request("a")])
    assert peer.receive(2) == [AddEngine(B_ENGINE), request("a")]
    replacement = Peer(hub, 0, epoch=1)
    queue.disconnect_before(0, 1, "ended")
    deadline = time.monotonic() + 5
    while queue.connected_nodes != [0]:
        assert time.monotonic() < deadline
        queue.lost_groups([])  # handles what has arrived
    repeated_request = msgspec.structs.replace(request("a"), attempt=1)
    assert replacement.receive(2) == [AddEngine(B_ENGINE), repeated_request]
    replacement.close()


def test_an_engine_is_lent_until_a_sync_after_the_return_of_the_nodes_own(
    lending_queue: RolloutQueue, peer: Peer
) -> None:
    """Requests may be running on it until then."""
    lending_queue.set_version(1)
    assert peer.receive(1) == [SetVersion(1)]
    lending_queue.add_engine(A_ENGINE)
    lending_queue.set_version(1)  # to the engine that has joined
    assert peer.receive(2) == [AddEngine(A_ENGINE), SetVersion(1)]
    lending_queue.set_version(2)
    assert peer.receive(2) == [SetVersion(2), RemoveEngine(B_ENGINE.url)]
    lending_queue.set_version(3)
    assert peer.receive(1) == [SetVersion(3)]


def test_a_collector_without_requests_gives_lent_engines_back_after_a_sync(
    lending_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    peer.send(group_done("a"))
    other.send(group_done("b"))
    list(lending_queue.as_completed(idle))
    lending_queue.set_version(1)
    assert peer.receive(2) == [SetVersion(1), RemoveEngine(B_ENGINE.url)]


def test_requests_move_to_another_node_if_their_own_cannot_use_its_engines(
    lending_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    """The engine counts as healthy, because its own node can use it."""
    observer = Observer()
    lending_queue.observer = observer
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    peer.send(group_done("a"))  # too late
    deadline = time.monotonic() + 5
    while lending_queue.num_repeated == 0:
        assert time.monotonic() < deadline
        lending_queue.lost_groups([])  # handles what has arrived
    assert peer.receive(2) == [RemoveEngine(B_ENGINE.url), Withdraw(("a",))]
    assert requested_ids(other, 1) == ["a"]
    other.send(group_done("b"))
    other.send(msgspec.structs.replace(group_done("a"), attempt=1))
    groups = list(lending_queue.as_completed(idle))
    assert sorted(group.group_id for group in groups) == ["a", "b"]
    assert observer.failed_engines == []
    lending_queue.release(["a"])
    assert [m for m in other.receive(1) if isinstance(m, Release)] == [Release(("a",))]
    # With its own engine it gets requests again
    lending_queue.add_engine(A_ENGINE)
    lending_queue.submit([request("d")])
    assert requested_ids(peer, 2) == ["d"]


def test_a_collector_gets_engines_of_a_node_whose_collector_is_not_connected(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.submit([request("a")])
    assert requested_ids(peer, 1) == ["a"]
    queue.add_engine(B_ENGINE)
    assert peer.receive(1) == [AddEngine(B_ENGINE)]
    peer.send(group_done("a"))
    assert [group.group_id for group in queue.as_completed(idle)] == ["a"]
    queue.remove_engine(B_ENGINE.url)
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]
    queue.add_engine(B_ENGINE)
    queue.submit([request("b")])
    assert peer.receive(2) == [AddEngine(B_ENGINE), request("b")]


def test_requests_that_no_engine_can_answer_move_once_another_collector_connects(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    queue.add_engine(B_ENGINE)
    queue.submit([request("a")])
    assert peer.receive(2) == [AddEngine(B_ENGINE), request("a")]
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    assert peer.receive(1) == []
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.lost_groups([])  # handles the connection
    assert peer.receive(2) == [RemoveEngine(B_ENGINE.url), Withdraw(("a",))]
    assert "a" in requested_ids(other, 2)
    other.send(msgspec.structs.replace(group_done("a"), attempt=1))
    assert [group.group_id for group in queue.as_completed(idle)] == ["a"]
    other.close()
