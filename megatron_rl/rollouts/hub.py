"""Rank 0's end of the wire to the collectors."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.rollouts.messages import MAX_MESSAGE_BYTES, Alive, FromCollector, ToCollector

_LINGER_MILLISECONDS = 1000

_decoder: msgspec.msgpack.Decoder[FromCollector] = msgspec.msgpack.Decoder(FromCollector)


class CollectorLost(Failure):
    """A collector did not connect in time, is not heard any more, or does not speak as one."""

    exit_code = ExitCode.ENGINE_FAILED


class Hub:
    """Hears and answers the collectors that hold the run's keys; `poll` returns what they said.

    `address`: host and port. `run_key`: what a collector needs to be heard; a secret. Traffic is
    encrypted (CURVE). silence_seconds: a collector that says nothing for so long, while the hub
    listens, is lost.
    """

    def __init__(self, host: str, *, silence_seconds: float = 12.0) -> None:
        hub_public, hub_secret = zmq.curve_keypair()
        collector_public, collector_secret = zmq.curve_keypair()
        self.run_key = (hub_public + collector_secret).decode()
        self._silence_seconds = silence_seconds
        self._silent: dict[int, float] = {}  # node -> seconds listened since it was last heard
        self._inbox: deque[tuple[int, FromCollector]] = deque()
        self._context = zmq.Context()
        self._gate = ThreadAuthenticator(self._context)
        self._gate.start()
        self._gate.configure_curve_callback(credentials_provider=_OneKey(collector_public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = hub_secret
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = (
            0  # what is outstanding bounds the queues; nothing may be dropped
        )
        self._socket.router_mandatory = True  # sending to a collector that is gone raises
        self._socket.linger = _LINGER_MILLISECONDS
        self._socket.bind(f"tcp://{host}:*")
        self.address = (host, int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]))

    @property
    def nodes(self) -> list[int]:
        return sorted(self._silent)

    def wait_for(self, num_nodes: int, deadline_seconds: float) -> None:
        """Block until every node's collector was heard. Raises `CollectorLost`."""
        deadline = time.monotonic() + deadline_seconds
        while len(self._silent) < num_nodes:
            if time.monotonic() > deadline:
                raise CollectorLost(
                    f"{len(self._silent)} of {num_nodes} collectors connected to {self.address} within "
                    f"{deadline_seconds:g} s; see the collector logs in the run directory"
                )
            self._receive(0.1)

    def send(self, node: int, message: ToCollector) -> None:
        """Send without waiting for delivery. Raises `CollectorLost`."""
        try:
            self._socket.send_multipart([_name(node), msgspec.msgpack.encode(message)])
        except zmq.ZMQError as error:
            raise CollectorLost(
                f"the collector of node {node} is gone: {error}; {_log_of(node)}"
            ) from error

    def poll(self, timeout_seconds: float) -> tuple[int, FromCollector] | None:
        """The next message and its node, or None after the timeout. Raises `CollectorLost`."""
        if not self._inbox:
            self._receive(timeout_seconds)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        """Deliver what was sent, for a second at most, and stop listening."""
        self._socket.close()
        self._gate.stop()
        self._context.term()

    def _receive(self, timeout_seconds: float) -> None:
        """Wait for messages, take in all there are, and count the others' silence."""
        start = time.monotonic()
        heard = set()
        if self._socket.poll(int(timeout_seconds * 1000)):
            while self._socket.poll(0):
                heard.add(self._take(*self._socket.recv_multipart()))
        # a suspended hub heard nothing because it did not listen: the clock's jump is nobody's
        # silence
        listened = min(time.monotonic() - start, timeout_seconds)
        for node, seconds in self._silent.items():
            self._silent[node] = 0.0 if node in heard else seconds + listened
        for node, seconds in self._silent.items():
            if seconds > self._silence_seconds:
                raise CollectorLost(
                    f"the collector of node {node} was not heard for {seconds:.0f} s: it is stopped, cut off, or its "
                    f"scorer or environment blocks it; {_log_of(node)}"
                )

    def _take(self, sender: bytes, *body: bytes) -> int:
        try:
            node, message = int(sender), _decoder.decode(b"".join(body))
        except (ValueError, msgspec.MsgspecError) as error:
            who = sender.decode(errors="replace")
            raise CollectorLost(
                f"the collector of node {who} sent a message that is not one ({error}); {_log_of(who)}"
            ) from error
        self._silent.setdefault(node, 0.0)
        if not isinstance(message, Alive):
            self._inbox.append((node, message))
        return node


class _OneKey:
    """Lets in whoever holds the secret half of one key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def _name(node: int) -> bytes:
    return str(node).encode()


def _log_of(node: int | str) -> str:
    return f"see logs/collector-{node}.log in the run directory"
