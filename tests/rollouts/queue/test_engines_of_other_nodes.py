"""Requests go to nodes with engines, or to others if there is none. Simulated collectors."""

from collections.abc import Callable, Iterator

import msgspec
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import Drop, EngineLeftOut, GroupRequest, Serve, ToCollector
from sglang_bridge.engine import Engine
from tests.support.collectors import Observer, Peer, group_done, request, requested_ids

A_ENGINE = Engine(url="http://a:1", node=0)
B_ENGINE = Engine(url="http://b:1", node=1)


@pytest.fixture
def queue(hub: CollectorHub, peer: Peer) -> RolloutQueue:
    return RolloutQueue(hub, RolloutSettings(max_new_tokens=4, max_staleness=1))


@pytest.fixture
def observer(queue: RolloutQueue) -> Observer:
    observer = Observer()
    queue.on_engine_failure = observer.handle_engine_failure
    return observer


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
def bereft_queue(queue: RolloutQueue, peer: Peer, other: Peer) -> RolloutQueue:
    """Node 0 has begun with group a when its only engine leaves. Node 1 has begun with group b."""
    queue.submit([])  # handles the connections
    queue.set_engines([A_ENGINE, B_ENGINE])
    queue.submit([request("a"), request("b")])
    assert requested_ids(peer, 2) == ["a"]
    assert requested_ids(other, 2) == ["b"]
    queue.set_engines([B_ENGINE])
    assert engines_of(peer.receive(1)) == [(B_ENGINE,)]
    assert engines_of(other.receive(1)) == [(B_ENGINE,)]
    return queue


def engines_of(messages: list[ToCollector]) -> list[tuple[Engine, ...]]:
    """Return the engines of each state among these messages."""
    return [message.engines for message in messages if isinstance(message, Serve)]


def repeated(name: str, attempt: int = 1) -> GroupRequest:
    return msgspec.structs.replace(request(name), attempt=attempt)


def handle_until(queue: RolloutQueue, condition: Callable[[], object], peer: Peer) -> None:
    """Handle events until a condition holds."""
    for _ in range(1000):
        if condition():
            return
        queue.lost_groups([])  # handles what has arrived
        peer.receive_now()
    raise AssertionError("the condition does not hold")


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
    queue.set_engines(
        [
            Engine(url=f"http://{node}:{port}", node=node, tp=tp)
            for node, sizes in enumerate(ranks)
            for port, tp in enumerate(sizes, 1)
        ]
    )
    queue.submit([request(f"g{n}") for n in range(64)])
    num_sent = tuple(
        len(requested_ids(collector, share + 1))
        for collector, share in zip((peer, other), shares, strict=True)
    )
    assert num_sent == shares


def test_a_node_that_has_lost_engines_gets_fewer_requests_from_then_on(
    queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    engines = [Engine(url=f"http://{n}:{port}", node=n) for n in (0, 1) for port in (1, 2, 3, 4)]
    queue.set_engines(engines)
    queue.set_engines([engines[0], *engines[4:]])
    queue.submit([request(f"g{n}") for n in range(40)])
    assert len(requested_ids(peer, 9)) == 8
    assert len(requested_ids(other, 33)) == 32


def test_every_collector_knows_the_engines_of_all_nodes(
    queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    queue.submit([])
    queue.set_engines([A_ENGINE, B_ENGINE])
    for collector in (peer, other):
        assert engines_of(collector.receive(1)) == [(A_ENGINE, B_ENGINE)]


def test_a_collector_whose_last_engine_leaves_goes_on_with_those_of_other_nodes(
    bereft_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    """Its requests stay where they are. New ones go to nodes that have engines."""
    bereft_queue.submit([request("c")])
    assert requested_ids(other, 1) == ["c"]
    assert peer.receive() == []
    peer.send(group_done("a"))
    other.send(group_done("b"))
    other.send(group_done("c"))
    groups = list(bereft_queue.as_completed(idle))
    assert sorted(group.group_id for group in groups) == ["a", "b", "c"]
    assert bereft_queue.num_repeated == 0


def test_requests_go_to_a_collector_without_engines_if_no_connected_one_has_any(
    queue: RolloutQueue, peer: Peer
) -> None:
    queue.set_engines([B_ENGINE])
    queue.submit([request("a")])
    assert requested_ids(peer, 2) == ["a"]


def test_requests_move_to_another_node_if_their_own_cannot_use_its_engines(
    bereft_queue: RolloutQueue, observer: Observer, peer: Peer, other: Peer
) -> None:
    """The engine counts as healthy, because its own node can use it."""
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    peer.send(group_done("a"))  # too late
    handle_until(bereft_queue, lambda: bereft_queue.num_repeated, peer)
    assert requested_ids(other, 1) == ["a"]
    other.send(group_done("b"))
    other.send(msgspec.structs.replace(group_done("a"), attempt=1))
    groups = list(bereft_queue.as_completed(idle))
    assert sorted(group.group_id for group in groups) == ["a", "b"]
    assert observer.failed_engines == []
    bereft_queue.drop(["a"])
    assert other.receive(1) == [Drop(("a",))]
    # With its own engine it gets requests again
    bereft_queue.set_engines([A_ENGINE, B_ENGINE])
    bereft_queue.submit([request("d")])
    assert requested_ids(peer, 2) == ["d"]


def test_a_collector_that_cannot_use_an_engine_does_not_get_it_in_its_state(
    bereft_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    messages: list[ToCollector] = []
    for _ in range(1000):
        bereft_queue.lost_groups([])
        messages += peer.receive_now()
        if Drop(("a",)) in messages:
            break
    assert engines_of(messages) == [()]
    assert engines_of(other.receive(1)) == []


def test_an_engine_that_no_collector_can_use_counts_as_failed(
    queue: RolloutQueue, observer: Observer, peer: Peer
) -> None:
    """Otherwise nobody would look after it, and its requests would wait without end."""
    queue.set_engines([B_ENGINE])
    queue.submit([request("a")])
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    handle_until(queue, lambda: observer.failed_engines, peer)
    assert observer.failed_engines == [(B_ENGINE.url, "no route to host")]
    assert queue.engines_left_out == {B_ENGINE.url}
    peer.receive()
    # Rank 0 has probed it
    queue.set_engines([])
    queue.set_engines([B_ENGINE])
    assert engines_of(peer.receive(2)) == [(), (B_ENGINE,)]


def test_requests_of_a_node_that_cannot_use_the_only_engine_move_to_one_that_can(
    queue: RolloutQueue, observer: Observer, peer: Peer, other: Peer
) -> None:
    """The engine belongs to a third node, whose collector is not connected."""
    engine = Engine(url="http://c:1", node=2)
    queue.set_engines([engine])
    queue.submit([request("a")])
    assert requested_ids(peer, 2) == ["a"]
    peer.send(EngineLeftOut(engine.url, "no route to host"))
    handle_until(queue, lambda: queue.num_repeated, peer)
    assert repeated("a") in other.receive(2)
    queue.submit([request("b")])  # node 0 has the smaller load
    assert requested_ids(other, 1) == ["b"]
    assert observer.failed_engines == []


def test_an_engine_that_could_not_be_used_is_tried_again_after_a_sync(
    queue: RolloutQueue, observer: Observer, peer: Peer
) -> None:
    queue.set_engines([B_ENGINE])
    queue.submit([request("a")])
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    handle_until(queue, lambda: observer.failed_engines, peer)
    peer.receive()
    queue.set_version(1)
    (state,) = peer.receive(1)
    assert isinstance(state, Serve) and (state.engines, state.version) == ((B_ENGINE,), 1)


def test_an_engine_that_could_not_be_used_is_tried_again_if_its_own_collector_ends(
    bereft_queue: RolloutQueue, peer: Peer, other: Peer
) -> None:
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    handle_until(bereft_queue, lambda: bereft_queue.num_repeated == 1, peer)
    peer.receive()
    bereft_queue.disconnect_before(1, 1, "ended")
    bereft_queue.lost_groups([])
    assert bereft_queue.num_repeated == 3
    messages = peer.receive(3)
    assert engines_of(messages) == [(B_ENGINE,)]
    assert {m.group_id for m in messages if isinstance(m, GroupRequest)} == {"a", "b"}


def test_a_second_report_about_an_engine_of_another_node_changes_nothing(
    bereft_queue: RolloutQueue, observer: Observer, peer: Peer
) -> None:
    for _ in range(2):
        peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    peer.send(EngineLeftOut(A_ENGINE.url, "it fell silent"))
    handle_until(bereft_queue, lambda: observer.failed_engines, peer)
    assert observer.failed_engines == [(A_ENGINE.url, "it fell silent")]
    assert bereft_queue.num_repeated == 1


def test_requests_that_no_engine_can_answer_move_once_another_collector_connects(
    hub: CollectorHub, queue: RolloutQueue, observer: Observer, peer: Peer
) -> None:
    queue.set_engines([B_ENGINE])
    queue.submit([request("a")])
    peer.send(EngineLeftOut(B_ENGINE.url, "no route to host"))
    handle_until(queue, lambda: observer.failed_engines, peer)
    other = Peer(hub, 1)
    hub.wait_for(2, 5)
    queue.lost_groups([])  # handles the connection
    assert repeated("a") in other.receive(2)
    assert Drop(("a",)) in peer.receive(1)
    other.send(msgspec.structs.replace(group_done("a"), attempt=1))
    assert [group.group_id for group in queue.as_completed(idle)] == ["a"]
    other.close()
