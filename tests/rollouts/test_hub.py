"""Connection of rank 0 to the collectors."""

import re
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.rollouts.queue import hub as hub_module
from megatron_rl.rollouts.queue.hub import CollectorConnected, CollectorGone, CollectorHub, Event
from megatron_rl.rollouts.wire.messages import MAX_MESSAGE_BYTES, Alive, Drop, Problem, Stop
from tests.support.collectors import Peer, group_done
from tests.support.rollout_refs import make_ref
from tests.support.rollouts import make_rollout


@pytest.fixture
def hub() -> Iterator[CollectorHub]:
    hub = CollectorHub("127.0.0.1", silence_seconds=1.0)
    yield hub
    hub.close()


def next_event(hub: CollectorHub, seconds: float = 5) -> tuple[int, Event] | None:
    """Return the next event after a connection, with its node."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        event = hub.poll(0.1)
        if event is not None and not isinstance(event[1], CollectorConnected):
            return event
    return None


def next_loss(hub: CollectorHub) -> tuple[int, int, str]:
    """Return the node, the epoch and the reason of the next collector that is gone."""
    event = next_event(hub)
    assert event is not None
    node, loss = event
    assert isinstance(loss, CollectorGone)
    return node, loss.epoch, loss.reason


def test_messages_go_both_ways(hub: CollectorHub, peer: Peer) -> None:
    assert hub.nodes == [0]
    hub.send(0, Stop())
    assert peer.receive(1) == [Stop()]
    peer.send(Problem("x"))
    assert next_event(hub) == (0, Problem("x"))


def test_only_holders_of_the_run_key_can_connect(hub: CollectorHub) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    strangers = [
        Peer(hub, 0, run_key=hub.run_key[:40] + secret),
        Peer(hub, 1, run_key=public + hub.run_key[40:]),
    ]
    plain = zmq.Context()
    plain_socket = plain.socket(zmq.DEALER)
    plain_socket.connect("tcp://{}:{}".format(*hub.address))
    plain_socket.send(b"\x81\xa4type\xa5alive")
    with socket.create_connection(hub.address) as raw:
        raw.sendall(b"\xff\xff\xff\xffGET / HTTP/1.1\r\n" + b"x" * 4096)
        with pytest.raises(Failure, match="0 of 1"):
            hub.wait_for(1, 0.5)
    plain.destroy(0)
    peer_with_key = Peer(hub, 0)
    hub.wait_for(1, 5)
    for peer in (*strangers, peer_with_key):
        peer.close()


def test_a_collector_that_connects_is_an_event(hub: CollectorHub, peer: Peer) -> None:
    assert hub.poll(0) == (0, CollectorConnected(0))
    assert hub.poll(0) is None


def test_a_silent_collector_is_gone(hub: CollectorHub, peer: Peer) -> None:
    start = time.monotonic()
    node, epoch, reason = next_loss(hub)
    assert (node, epoch) == (0, 0) and hub.nodes == []
    assert re.search(r"node 0 was not heard .* logs/collector-0\.log", reason)
    assert 0.9 < time.monotonic() - start < 15


def test_a_silent_collector_that_speaks_again_is_told_to_end(hub: CollectorHub, peer: Peer) -> None:
    """Its requests are with others by then."""
    assert next_loss(hub)[0] == 0
    assert peer.receive(1) == [Stop()]
    peer.send(group_done("a"))
    assert next_event(hub, 0.3) is None
    assert peer.receive(1) == [Stop()]


@pytest.mark.slow
def test_a_collector_with_a_heartbeat_is_not_lost(hub: CollectorHub, peer: Peer) -> None:
    other = Peer(hub, 1)
    deadline = time.monotonic() + 4
    losses: list[int] = []
    while time.monotonic() < deadline and not losses:
        peer.send(Alive())
        event = hub.poll(0.1)
        losses += [event[0]] if event and isinstance(event[1], CollectorGone) else []
    assert losses == [1] and hub.nodes == [0]
    other.close()


def test_a_new_collector_of_a_node_replaces_the_old_one(hub: CollectorHub, peer: Peer) -> None:
    assert hub.poll(0) == (0, CollectorConnected(0))
    new_peer = Peer(hub, 0, epoch=3)
    node, epoch, reason = next_loss(hub)
    assert (node, epoch) == (0, 0)
    assert reason.startswith("the collector of node 0 was replaced by a new one")
    assert hub.poll(1) == (0, CollectorConnected(3))
    peer.send(group_done("late"))
    new_peer.send(group_done("new"))
    assert next_event(hub) == (0, group_done("new"))
    assert next_event(hub, 0.3) is None
    assert set(map(type, peer.receive(2))) == {Stop}
    hub.send(0, Drop(("new",)))
    assert new_peer.receive(1) == [Drop(("new",))]
    new_peer.close()


def test_a_message_for_several_nodes_reaches_those_that_are_connected(
    hub: CollectorHub, peer: Peer
) -> None:
    other = Peer(hub, 3)
    hub.wait_for(2, 5)
    hub.send_to_each([0, 1, 3], Drop(("a",)))
    assert [peer.receive(1), other.receive(1)] == [[Drop(("a",))]] * 2
    other.close()


def test_a_message_for_many_nodes_is_encoded_once(
    hub: CollectorHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Drop] = []

    def encode(message: Drop) -> bytes:
        messages.append(message)
        return msgspec.msgpack.encode(message)

    codec = SimpleNamespace(msgpack=SimpleNamespace(encode=encode))
    monkeypatch.setattr(hub_module, "msgspec", codec)
    hub.send_to_each(range(64), Drop(("a",)))
    assert len(messages) == 1


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_collector_of_an_epoch_that_is_gone_is_told_to_end(hub: CollectorHub, epoch: int) -> None:
    """Another one of the node has been here already."""
    newest = Peer(hub, 0, epoch=2)
    hub.wait_for(1, 5)
    hub.disconnect(0, 2, "ended: it was killed")
    assert next_loss(hub)[:2] == (0, 2)
    newest.close()
    old_peer = Peer(hub, 0, epoch=epoch)
    old_peer.send(group_done("a"))
    assert next_event(hub, 0.5) is None
    assert hub.nodes == []
    assert Stop() in old_peer.receive(1)
    old_peer.close()


def test_a_collector_is_disconnected_once(hub: CollectorHub, peer: Peer) -> None:
    hub.disconnect(0, 7, "another epoch")
    hub.disconnect(1, 0, "another node")
    assert hub.nodes == [0]
    for _ in range(2):
        hub.disconnect(0, 0, "ended: killed by signal 9")
    node, epoch, reason = next_loss(hub)
    assert (node, epoch) == (0, 0)
    assert reason.startswith("the collector of node 0 ended: killed by signal 9; see logs/")
    assert next_event(hub, 0.2) is None
    assert peer.receive(1) == [Stop()]


def test_messages_before_a_loss_come_before_it(hub: CollectorHub, peer: Peer) -> None:
    peer.send(group_done("a"))
    peer.send_raw(b"junk")
    peer.send(group_done("b"))
    assert next_event(hub) == (0, group_done("a"))
    assert next_loss(hub)[0] == 0
    assert next_event(hub, 0.2) is None


def test_time_when_the_hub_does_not_listen_is_not_silence(hub: CollectorHub, peer: Peer) -> None:
    """Rank 0 trains for minutes between two batches, and then receives the messages in between."""
    time.sleep(1.5)
    peer.send(Problem("x"))
    assert next_event(hub) == (0, Problem("x"))


@pytest.mark.parametrize("junk", [b"abc", b"", b"\x81\xa4type\xa7unknown"])
def test_a_collector_that_sends_an_invalid_message_is_gone(
    hub: CollectorHub, peer: Peer, junk: bytes
) -> None:
    peer.send_raw(junk)
    node, epoch, reason = next_loss(hub)
    assert (node, epoch) == (0, 0) and "node 0 sent an invalid message" in reason
    assert hub.nodes == []
    assert peer.receive(1) == [Stop()]


@pytest.mark.slow
def test_large_messages_arrive_and_oversized_ones_do_not(hub: CollectorHub, peer: Peer) -> None:
    message = group_done("a", (make_ref(make_rollout(3, 4)),) * 2000)
    peer.send(message)
    assert next_event(hub) == (0, message)
    peer.send_raw(bytes(MAX_MESSAGE_BYTES + 1))
    assert "was not heard" in next_loss(hub)[2]


def test_a_message_to_a_collector_that_has_ended_is_dropped_and_it_is_gone(
    hub: CollectorHub, peer: Peer
) -> None:
    peer.close()
    deadline = time.monotonic() + 5
    while hub.nodes and time.monotonic() < deadline:
        hub.send(0, Drop(("a",)))
        time.sleep(0.01)
    assert "node 0 is gone" in next_loss(hub)[2]
    hub.send(0, Stop())
    hub.send(7, Stop())


@pytest.mark.parametrize("name", [b"0", b"a.b", b"0.1.2"])
def test_a_collector_without_a_node_and_an_epoch_in_its_name_is_refused(
    hub: CollectorHub, name: bytes
) -> None:
    peer = Peer(hub, 0, name=name)
    with pytest.raises(Failure, match="invalid name"):
        hub.wait_for(1, 5)
    peer.close()
