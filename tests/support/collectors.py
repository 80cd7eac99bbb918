"""A collector's end of the wire, driven by a test."""

import msgspec
import zmq

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.rollouts.hub import Hub
from megatron_rl.rollouts.link import present_run_key
from megatron_rl.rollouts.messages import Alive, FromCollector, GroupDone, GroupRequest, ToCollector


class Peer:
    """Speaks to a hub as the collector of `node`, or with another key as a stranger."""

    def __init__(self, hub: Hub, node: int, *, run_key: str | None = None) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        present_run_key(self._socket, run_key or hub.run_key)
        self._socket.routing_id = str(node).encode()
        self._socket.linger = 0
        self._socket.connect("tcp://{}:{}".format(*hub.address))
        self.say(Alive())

    def say(self, message: FromCollector) -> None:
        self._socket.send(msgspec.msgpack.encode(message))

    def say_raw(self, data: bytes) -> None:
        self._socket.send(data)

    def hear(self, at_least: int = 0) -> list[ToCollector]:
        """So many messages, and all that arrives until half a second passes without one, or less
        after the first.
        """
        heard, decoder = [], msgspec.msgpack.Decoder(ToCollector)
        while self._socket.poll(5000 if len(heard) < at_least else 100 if heard else 500):
            heard.append(decoder.decode(self._socket.recv()))
        return heard

    def hang_up(self, *, linger_seconds: float = 0) -> None:
        """linger_seconds: how long to try to deliver what was said."""
        self._context.destroy(int(linger_seconds * 1000))


def request(name: str, num_samples: int = 2, *, evaluation: bool = False) -> GroupRequest:
    return GroupRequest(
        group_id=name,
        prompt=Prompt(id=name, token_ids=(1, 2), answer="3", task="t"),
        num_samples=num_samples,
        sampling=Sampling(max_new_tokens=4, temperature=1.0),
        evaluation=evaluation,
    )


def done(name: str, samples: tuple[RolloutRef, ...] = (), **changes: object) -> GroupDone:
    group = Group(group_id=name, prompt=request(name).prompt, rollouts=samples)
    return GroupDone(group=msgspec.structs.replace(group, **changes), generated_tokens=5)
