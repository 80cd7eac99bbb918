"""Engines that are lent to collectors of other nodes, with simulated collectors."""

import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.credit.group_kinds import GroupKind
from megatron_rl.prompts.selection.extension import Extension
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.messages import (
    AddEngine,
    EngineLeftOut,
    GroupAborted,
    GroupRequest,
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


def borrow(queue: RolloutQueue, peer: Peer, engine: Engine) -> None:
    """Request group a from node 0, which gets the only engine, of a node without a collector."""
    queue.add_engine(engine)
    queue.submit([request("a")])
    assert peer.receive(2) == [AddEngine(engine), request("a")]


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        (([1], [1]), (32, 32)),
        (([1, 1], [1]), (43, 21)),
        (([1] * 7, [1]), (56, 8)),
        (([4], [1, 1]), (43, 21)),
        (([2, 1], [8]), (18, 46)),
    ],
)
def test_each_node_gets_requests_for_the_ranks_of_its_engines(
    queue: RolloutQueue,
    peer: Peer,
    other: Peer,
    ranks: tuple[list[int], list[int]],
    shares: tuple[int, int],
) -> None:
    for node, sizes in enumerate(ranks):
        for port, tp in enumerate(sizes, 1):
            queue.add_engine(Engine(url=f"http://{node}:{port}", node=node, tp=tp))
    queue.submit([request(f"g{n}") for n in range(64)])
    num_sent = (len(requested_ids(peer, shares[0] + len(ranks[0]))), queue._loads)
    num_samples = request("a").num_samples
    assert num_sent == (shares[0], {node: n * num_samples for node, n in enumerate(shares)})


def test_a_node_that_has_lost_engines_gets_fewer_requests_from_then_on(
    queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    for node in (0, 1):
        for port in (1, 2, 3, 4):
            queue.add_engine(Engine(url=f"http://{node}:{port}", node=node))
    for port in (2, 3, 4):
        queue.remove_engine(f"http://0:{port}")
    queue.submit([request(f"g{n}") for n in range(40)])
    num_samples = request("a").num_samples
    assert queue._loads == {0: 8 * num_samples, 1: 32 * num_samples}


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
    assert peer.receive(2) == [RemoveEngine(B_ENGINE.url), AddEngine(B_ENGINE)]
    assert other.receive(1) == [AddEngine(B_ENGINE)]
    lending_queue.add_engine(A_ENGINE)
    assert peer.receive(1) == [AddEngine(A_ENGINE)]
    lending_queue.add_engine(B_ENGINE)
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]  # node 0 does not need it any more


def test_a_collector_that_replaces_a_lost_one_gets_lent_engines_again(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    borrow(queue, peer, B_ENGINE)
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
    """Requests may be running on it until then. Those that wait for new weights do not use it."""
    lending_queue.set_version(1)
    assert peer.receive(1) == [SetVersion(1)]
    lending_queue.add_engine(A_ENGINE)
    lending_queue.set_version(1)  # to the engine that has joined
    assert peer.receive(2) == [AddEngine(A_ENGINE), SetVersion(1)]
    lending_queue.set_version(2)
    assert peer.receive(2) == [RemoveEngine(B_ENGINE.url), SetVersion(2)]
    lending_queue.set_version(3)
    assert peer.receive(1) == [SetVersion(3)]


def test_a_collector_without_requests_gives_lent_engines_back(
    lending_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    lending_queue.add_engine(A_ENGINE)
    assert peer.receive(1) == [AddEngine(A_ENGINE)]
    peer.send(group_done("a"))
    other.send(group_done("b"))
    list(lending_queue.as_completed(idle))
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]


@pytest.mark.parametrize("drop", ["withdraw", "abort"])
def test_a_collector_whose_requests_are_dropped_gives_lent_engines_back(
    lending_queue: RolloutQueue, peer: Peer, drop: str
) -> None:
    if drop == "withdraw":
        lending_queue.withdraw(["a"])
    else:
        peer.send(GroupAborted(group_id="a", generated_tokens=3, attempt=0))
        assert lending_queue.abort(["a"], idle) == (3, 0)
    assert RemoveEngine(B_ENGINE.url) in peer.receive(2)


def test_a_collector_that_extends_a_group_keeps_lent_engines(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.add_engine(B_ENGINE)
    rule = Extension(4, (GroupKind.TOO_FEW_VERDICTS,))
    probe = msgspec.structs.replace(request("a"), extension=rule)
    queue.submit([probe])
    assert peer.receive(2) == [AddEngine(B_ENGINE), probe]
    peer.send(msgspec.structs.replace(group_done("a"), is_extended=True))
    handle_until(queue, lambda: queue.arrived_groups(["a"]))
    assert peer.receive() == []
    queue.submit([probe.rest()])  # its collector has it already
    peer.send(group_done(probe.rest().group_id))
    groups = list(queue.as_completed(idle))
    assert [group.group_id for group in groups] == ["a", probe.rest().group_id]
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]


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
    queue.remove_engine(B_ENGINE.url)
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]
    queue.add_engine(B_ENGINE)
    assert peer.receive(1) == [AddEngine(B_ENGINE)]
    peer.send(group_done("a"))
    assert [group.group_id for group in queue.as_completed(idle)] == ["a"]
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]
    queue.submit([request("b")])
    assert peer.receive(2) == [AddEngine(B_ENGINE), request("b")]


def handle_until(queue: RolloutQueue, condition: Callable[[], object]) -> None:
    """Handle events until a condition holds."""
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        queue.lost_groups([])  # handles what has arrived


def test_an_engine_that_no_collector_can_use_counts_as_failed(
    queue: RolloutQueue, peer: Peer
) -> None:
    """Otherwise nobody would look after it, and its requests would wait without end."""
    observer = Observer()
    queue.observer = observer
    borrow(queue, peer, B_ENGINE)
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    handle_until(queue, lambda: observer.failed_engines)
    assert observer.failed_engines == [(B_ENGINE.url, "no route to host")]
    assert queue.engines_left_out == {B_ENGINE.url}
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]
    # Rank 0 has probed it
    queue.remove_engine(B_ENGINE.url)
    queue.add_engine(B_ENGINE)
    assert peer.receive(1) == [AddEngine(B_ENGINE)]


def test_requests_of_a_node_that_cannot_use_the_only_engine_move_to_one_that_can(
    queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    """The engine belongs to a third node, whose collector is not connected."""
    observer = Observer()
    queue.observer = observer
    engine = Engine(url="http://c:1", node=2)
    borrow(queue, peer, engine)
    peer.send(EngineLeftOut(engine.url, "no route to host"))
    handle_until(queue, lambda: queue.num_repeated)
    repeated_request = msgspec.structs.replace(request("a"), attempt=1)
    assert other.receive(2) == [AddEngine(engine), repeated_request]
    queue.submit([request("b")])  # node 0 has the smaller load
    assert requested_ids(other, 1) == ["b"]
    assert peer.receive() == [RemoveEngine(engine.url), Withdraw(("a",))]
    assert observer.failed_engines == []


def test_an_engine_that_could_not_be_used_is_lent_again_after_a_sync(
    queue: RolloutQueue, peer: Peer
) -> None:
    borrow(queue, peer, B_ENGINE)
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    handle_until(queue, lambda: queue.engines_left_out)
    assert peer.receive(1) == [RemoveEngine(B_ENGINE.url)]
    queue.set_version(1)
    assert peer.receive(2) == [SetVersion(1), AddEngine(B_ENGINE)]


def test_an_engine_that_could_not_be_used_is_lent_again_if_its_own_collector_ends(
    hub: CollectorHub, lending_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    handle_until(lending_queue, lambda: lending_queue.num_repeated == 1)
    assert peer.receive(2) == [RemoveEngine(B_ENGINE.url), Withdraw(("a",))]
    lending_queue.disconnect_before(1, 1, "ended")
    handle_until(lending_queue, lambda: lending_queue.num_repeated == 3)
    messages = peer.receive(3)
    assert messages[0] == AddEngine(B_ENGINE)
    assert {m.group_id for m in messages if isinstance(m, GroupRequest)} == {"a", "b"}


def test_a_late_report_about_an_engine_that_was_taken_back_is_ignored(
    lending_queue: RolloutQueue, peer: Peer
) -> None:
    observer = Observer()
    lending_queue.observer = observer
    lending_queue.add_engine(A_ENGINE)
    lending_queue.set_version(1)
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    peer.send(EngineLeftOut(A_ENGINE.url, "it fell silent"))
    handle_until(lending_queue, lambda: observer.failed_engines)
    assert observer.failed_engines == [(A_ENGINE.url, "it fell silent")]


def test_requests_that_no_engine_can_answer_move_once_another_collector_connects(
    hub: CollectorHub, queue: RolloutQueue, peer: Peer
) -> None:
    borrow(queue, peer, B_ENGINE)
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
