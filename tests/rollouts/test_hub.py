import socket
import time
from collections.abc import Iterator

import pytest
import zmq

from launch.testbed.rollout_refs import make_ref
from megatron_rl.rollouts.hub import CollectorHub, CollectorLost
from megatron_rl.rollouts.messages import MAX_MESSAGE_BYTES, Alive, Failed, Stop
from tests.support.collectors import Peer, done
from tests.support.rollouts import make_rollout


@pytest.fixture
def hub() -> Iterator[CollectorHub]:
    hub = CollectorHub("127.0.0.1", silence_seconds=1.0)
    yield hub
    hub.close()


def heard(hub: CollectorHub, seconds: float = 5) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (received := hub.poll(0.1)) is not None:
            return received
    return None


def test_messages_go_both_ways(hub: CollectorHub, peer: Peer) -> None:
    assert hub.nodes == [0]
    hub.send(0, Stop())
    assert peer.hear(1) == [Stop()]
    peer.say(Failed("x"))
    assert heard(hub) == (0, Failed("x"))


def test_only_holders_of_the_run_key_are_heard(hub: CollectorHub) -> None:
    public, secret = (key.decode() for key in zmq.curve_keypair())
    strangers = [
        Peer(hub, 0, run_key=hub.run_key[:40] + secret),
        Peer(hub, 1, run_key=public + hub.run_key[40:]),
    ]
    plain = zmq.Context()
    naked = plain.socket(zmq.DEALER)
    naked.connect("tcp://{}:{}".format(*hub.address))
    naked.send(b"\x81\xa4type\xa5alive")
    with socket.create_connection(hub.address) as raw:
        raw.sendall(b"\xff\xff\xff\xffGET / HTTP/1.1\r\n" + b"x" * 4096)
        with pytest.raises(CollectorLost, match="0 of 1"):
            hub.wait_for(1, 0.5)
    plain.destroy(0)
    own = Peer(hub, 0)
    hub.wait_for(1, 5)
    for peer in (*strangers, own):
        peer.hang_up()


def test_a_silent_collector_is_lost_by_name(hub: CollectorHub, peer: Peer) -> None:
    start = time.monotonic()
    with pytest.raises(CollectorLost, match=r"node 0 was not heard .* logs/collector-0\.log"):
        while True:
            hub.poll(0.1)
    assert 0.9 < time.monotonic() - start < 4


def test_a_collector_that_speaks_is_kept(hub: CollectorHub, peer: Peer) -> None:
    other = Peer(hub, 1)
    deadline = time.monotonic() + 4
    with pytest.raises(CollectorLost, match="node 1"):
        while time.monotonic() < deadline:
            peer.say(Alive())
            assert hub.poll(0.1) is None
    other.hang_up()


def test_a_hub_that_does_not_listen_blames_nobody(hub: CollectorHub, peer: Peer) -> None:
    """Rank 0 trains for minutes between two batches; what was said meanwhile is heard first."""
    time.sleep(1.5)
    peer.say(Failed("x"))
    assert heard(hub) == (0, Failed("x"))


@pytest.mark.parametrize("junk", [b"abc", b"", b"\x81\xa4type\xa7unknown"])
def test_garbage_from_a_known_collector_ends_the_run(hub: CollectorHub, peer: Peer, junk: bytes) -> None:
    peer.say_raw(junk)
    with pytest.raises(CollectorLost, match="node 0 sent an invalid message"):
        heard(hub)


def test_large_messages_arrive_whole_and_oversized_ones_never(hub: CollectorHub, peer: Peer) -> None:
    message = done("a", (make_ref(make_rollout(3, 4)),) * 2000)
    peer.say(message)
    assert heard(hub) == (0, message)
    peer.say_raw(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(CollectorLost, match="was not heard"):
        heard(hub)


def test_sending_to_a_collector_that_is_gone_is_noticed(hub: CollectorHub, peer: Peer) -> None:
    peer.hang_up()
    deadline = time.monotonic() + 5
    with pytest.raises(CollectorLost, match="node 0 is gone"):
        while time.monotonic() < deadline:
            hub.send(0, Stop())
            time.sleep(0.01)
