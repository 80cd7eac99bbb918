"""A collector's connection to the hub, driven by a test."""

import asyncio

import msgspec
import zmq

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.rollouts.collector.link import present_run_key
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import (
    Alive,
    FromCollector,
    GroupDone,
    GroupRequest,
    ToCollector,
    collector_name,
)


class Peer:
    """Connects to a hub as the collector of `node`.

    epoch: counts the starts of the node's collector. run_key: None for the key of the hub. name:
    None for the name of the node and the epoch.
    """

    def __init__(
        self,
        hub: CollectorHub,
        node: int,
        *,
        epoch: int = 0,
        run_key: str | None = None,
        name: bytes | None = None,
    ) -> None:
        # The context of the process: a context that is collected as garbage waits for its sockets,
        # and a failed test leaves its peers open.
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._socket = context.socket(zmq.DEALER)
        present_run_key(self._socket, run_key or hub.run_key)
        self._socket.routing_id = name or collector_name(node, epoch).encode()
        self._socket.linger = 0
        self._socket.connect("tcp://{}:{}".format(*hub.address))
        self.send(Alive())

    def send(self, message: FromCollector) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def send_raw(self, data: bytes) -> None:
        self._socket.send(data)

    def receive(self, at_least: int = 0, *, first_milliseconds: int = 500) -> list[ToCollector]:
        """Return `at_least` messages, and those that arrive until none comes for a while.

        It waits half a second for the first message and a tenth of a second after another one.
        """
        messages: list[ToCollector] = []
        decoder = msgspec.msgpack.Decoder(ToCollector)
        while True:
            milliseconds = 100 if messages else first_milliseconds
            if len(messages) < at_least:
                milliseconds = 5000
            if not self._socket.poll(milliseconds):
                return messages
            messages.append(decoder.decode(self._socket.recv()))

    def receive_now(self) -> list[ToCollector]:
        """Return the messages that arrive within a hundredth of a second."""
        messages: list[ToCollector] = []
        decoder = msgspec.msgpack.Decoder(ToCollector)
        while self._socket.poll(10):
            messages.append(decoder.decode(self._socket.recv()))
        return messages

    def close(self, *, linger_seconds: float = 0) -> None:
        """Disconnect. linger_seconds: time to deliver pending messages."""
        self._socket.close(int(linger_seconds * 1000))


class Outbox(asyncio.Queue[FromCollector]):
    """The messages of a collector to rank 0, without those about its demand."""

    async def put(self, item: FromCollector) -> None:
        if not isinstance(item, Alive):
            await super().put(item)


def request(name: str, num_samples: int = 2, *, evaluation: bool = False) -> GroupRequest:
    return GroupRequest(
        group_id=name,
        prompt=Prompt(id=name, token_ids=(1, 2), answer="3", task="t"),
        num_samples=num_samples,
        sampling=Sampling(max_new_tokens=4, temperature=1.0),
        evaluation=evaluation,
    )


def group_done(name: str, samples: tuple[RolloutRef, ...] = (), **changes: object) -> GroupDone:
    group = Group(group_id=name, prompt=request(name).prompt, rollouts=samples)
    return GroupDone(group=msgspec.structs.replace(group, **changes), generated_tokens=5)


def requested_ids(peer: Peer, count: int) -> list[str]:
    """Return the ids of the groups that the next `count` messages request."""
    return [
        message.group_id for message in peer.receive(count) if isinstance(message, GroupRequest)
    ]


class Observer:
    """Notes what a queue reports."""

    def __init__(self) -> None:
        self.failed_engines: list[tuple[str, str]] = []
        self.lost_collectors: list[tuple[int, int]] = []

    def handle_engine_failure(self, url: str, reason: str) -> None:
        self.failed_engines.append((url, reason))

    def handle_lost_collector(self, node: int, epoch: int, reason: str) -> None:
        self.lost_collectors.append((node, epoch))
