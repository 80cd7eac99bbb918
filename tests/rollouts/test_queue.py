import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.rollouts.frames import FrameReader, receive_available
from megatron_rl.rollouts.hub import CollectorLost, Hub
from megatron_rl.rollouts.messages import (
    Failed,
    FromCollector,
    GroupDone,
    GroupRequest,
    Hello,
    Release,
    ToCollector,
    frame,
)
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from support.rollouts import make_ref, make_rollout

KEY = "k" * 32


class Peer:
    """A collector's end of the wire, driven by the test."""

    def __init__(self, hub: Hub, node: int, key: str = KEY) -> None:
        self._socket = socket.create_connection(hub.address, timeout=5)
        self._reader = FrameReader()
        self.say(Hello(key=key, node=node))

    def say(self, message: FromCollector) -> None:
        self._socket.sendall(frame(message))

    def say_raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def hear(self) -> list[ToCollector]:
        decoder = msgspec.msgpack.Decoder(ToCollector)
        return [decoder.decode(body) for body in receive_available(self._socket, self._reader)]

    def hang_up(self) -> None:
        self._socket.close()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("127.0.0.1", KEY)
    yield hub
    hub.close()


def request(name: str, num_samples: int = 2) -> GroupRequest:
    return GroupRequest(
        group_id=name,
        prompt=Prompt(id=name, token_ids=(1, 2), answer="3", task="t"),
        num_samples=num_samples,
        sampling=Sampling(max_new_tokens=4, temperature=1.0),
    )


def done(name: str, samples: tuple[RolloutRef, ...] = ()) -> GroupDone:
    return GroupDone(group=Group(group_id=name, prompt=request(name).prompt, samples=samples), generated_tokens=5)


def idle() -> None:
    pass


def test_each_group_is_delivered_once_and_can_be_released(hub: Hub) -> None:
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    producer = RolloutQueue(hub)
    producer.submit([request("a"), request("b")])
    assert [m.group_id for m in peer.hear() if isinstance(m, GroupRequest)] == ["a", "b"]
    peer.say(done("b"))
    peer.say(done("a"))
    assert [g.group_id for g in producer.as_completed(idle)] == ["b", "a"]
    with pytest.raises(ValueError, match="once"):
        producer.submit([request("a")])
    producer.release(["a", "b"])
    assert peer.hear() == [Release(("a", "b"))]
    assert producer.generated_tokens == 10


def test_work_is_spread_by_outstanding_samples(hub: Hub) -> None:
    peers = [Peer(hub, 0), Peer(hub, 1)]
    hub.wait_for(2, 5)
    producer = RolloutQueue(hub)
    producer.submit([request("big", 5), request("x"), request("y"), request("z")])
    heard = [[m.group_id for m in peer.hear() if isinstance(m, GroupRequest)] for peer in peers]
    assert heard == [["big"], ["x", "y", "z"]]


def test_idle_is_called_while_waiting(hub: Hub) -> None:
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    producer = RolloutQueue(hub)
    producer.submit([request("a")])
    calls = []

    def answer_on_third_call() -> None:
        calls.append(1)
        if len(calls) == 3:
            peer.say(done("a"))

    assert len(list(producer.as_completed(answer_on_third_call, idle_every_seconds=0.01))) == 1
    assert len(calls) >= 3


def test_stale_samples_are_counted_not_delivered(hub: Hub) -> None:
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    producer = RolloutQueue(hub, max_staleness=1)
    sample = make_ref(make_rollout(3, 4))  # its response is of version 5
    for version, kept in ((5, 1), (6, 1), (7, 0)):
        producer.set_version(version)
        producer.submit([request(f"v{version}")])
        peer.say(done(f"v{version}", (sample,)))
        (group,) = producer.as_completed(idle)
        assert len(group.samples) == kept
        assert group.rejected == ({} if kept else {"stale": 1})


def test_a_snapshot_holds_what_was_not_delivered(hub: Hub) -> None:
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    producer = RolloutQueue(hub)
    producer.submit([request("a"), request("b")])
    peer.say(done("a"))
    next(producer.as_completed(idle))
    peer.hear()
    restored = RolloutQueue(hub)
    restored.restore(producer.snapshot())
    assert [m.group_id for m in peer.hear() if isinstance(m, GroupRequest)] == ["b"]
    assert restored.num_outstanding == 1


def test_failures_are_named(hub: Hub) -> None:
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    producer = RolloutQueue(hub)
    producer.submit([request("a")])
    peer.say(Failed("the engine has gone"))
    with pytest.raises(CollectorFailed, match="the engine has gone"):
        list(producer.as_completed(idle))
    peer.hang_up()
    with pytest.raises(CollectorLost, match="node 0"):
        list(producer.as_completed(idle))


def test_a_wrong_key_or_garbage_is_not_listened_to(hub: Hub) -> None:
    Peer(hub, 0, key="wrong")
    socket.create_connection(hub.address).sendall(b"\xff\xff\xff\xffGET / HTTP/1.1\r\n")
    with pytest.raises(CollectorLost, match="0 of 1"):
        hub.wait_for(1, 0.3)


def test_garbage_from_a_known_collector_ends_the_run(hub: Hub) -> None:
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    peer.say_raw(b"\x00\x00\x00\x03abc")
    with pytest.raises(CollectorLost, match="not one"):
        hub.poll(5)


def test_large_messages_arrive_whole(hub: Hub) -> None:
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    sample = make_ref(make_rollout(3, 4))
    message = GroupDone(
        group=Group(group_id="a", prompt=request("a").prompt, samples=(sample,) * 2000), generated_tokens=1
    )
    sender = threading.Thread(target=peer.say, args=(message,))
    sender.start()
    received = None
    while received is None:
        received = hub.poll(1)
    sender.join()
    assert received == (0, message)


def test_a_stranger_with_two_bad_frames_is_dropped_once(hub: Hub) -> None:
    stranger = socket.create_connection(hub.address)
    stranger.sendall(frame(Failed("a")) + frame(Failed("b")))
    oversized = socket.create_connection(hub.address)
    oversized.sendall((1 << 20).to_bytes(4, "big") + b"x" * 100)
    with pytest.raises(CollectorLost, match="0 of 1"):
        hub.wait_for(1, 0.3)
