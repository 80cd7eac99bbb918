"""Connection of rank 0 to the collectors."""

import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from launch.testbed.rollout_refs import make_ref
from megatron_rl.rollouts.hub import CollectorHub, CollectorLost
from megatron_rl.rollouts.messages import MAX_MESSAGE_BYTES, Alive, Failed, Stop
from tests.support.collectors import Peer, group_done
from tests.support.rollouts import make_rollout


@pytest.fixture
def hub() -> Iterator[CollectorHub]:
    hub = CollectorHub("127.0.0.1", silence_seconds=1.0)
    yield hub
    hub.close()


def next_message(hub: CollectorHub, seconds: float = 5) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (message := hub.poll(0.1)) is not None:
            return message
    return None


def test_messages_go_both_ways(hub: CollectorHub, peer: Peer) -> None:
    assert hub.nodes == [0]
    hub.send(0, Stop())
    assert peer.receive(1) == [Stop()]
    peer.send(Failed("x"))
    assert next_message(hub) == (0, Failed("x"))


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
        with pytest.raises(CollectorLost, match="0 of 1"):
            hub.wait_for(1, 0.5)
    plain.destroy(0)
    peer_with_key = Peer(hub, 0)
    hub.wait_for(1, 5)
    for peer in (*strangers, peer_with_key):
        peer.close()


def test_a_silent_collector_is_lost(hub: CollectorHub, peer: Peer) -> None:
    start = time.monotonic()
    with pytest.raises(CollectorLost, match=r"node 0 was not heard .* logs/collector-0\.log"):
        while True:
            hub.poll(0.1)
    assert 0.9 < time.monotonic() - start < 4


def test_a_collector_with_a_heartbeat_is_not_lost(hub: CollectorHub, peer: Peer) -> None:
    other = Peer(hub, 1)
    deadline = time.monotonic() + 4
    with pytest.raises(CollectorLost, match="node 1"):
        while time.monotonic() < deadline:
            peer.send(Alive())
            assert hub.poll(0.1) is None
    other.close()


def test_time_when_the_hub_does_not_listen_is_not_silence(hub: CollectorHub, peer: Peer) -> None:
    """Rank 0 trains for minutes between two batches, and then receives the messages in between."""
    time.sleep(1.5)
    peer.send(Failed("x"))
    assert next_message(hub) == (0, Failed("x"))


@pytest.mark.parametrize("junk", [b"abc", b"", b"\x81\xa4type\xa7unknown"])
def test_an_invalid_message_of_a_collector_ends_the_run(
    hub: CollectorHub, peer: Peer, junk: bytes
) -> None:
    peer.send_raw(junk)
    with pytest.raises(CollectorLost, match="node 0 sent an invalid message"):
        next_message(hub)


def test_large_messages_arrive_and_oversized_ones_do_not(hub: CollectorHub, peer: Peer) -> None:
    message = group_done("a", (make_ref(make_rollout(3, 4)),) * 2000)
    peer.send(message)
    assert next_message(hub) == (0, message)
    peer.send_raw(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(CollectorLost, match="was not heard"):
        next_message(hub)


def test_sending_to_a_collector_that_is_gone_is_an_error(hub: CollectorHub, peer: Peer) -> None:
    peer.close()
    deadline = time.monotonic() + 5
    with pytest.raises(CollectorLost, match="node 0 is gone"):
        while time.monotonic() < deadline:
            hub.send(0, Stop())
            time.sleep(0.01)
