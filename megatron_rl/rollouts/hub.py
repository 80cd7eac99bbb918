"""Connection of rank 0 to the collectors."""

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
    """A collector did not connect in time, fell silent, or sent an invalid message."""

    exit_code = ExitCode.ENGINE_FAILED


class CollectorHub:
    """Exchanges messages with the collectors that hold the run's key.

    The traffic is encrypted (CURVE).

    address: host and port.
    run_key: a secret that a collector needs to connect.
    silence_seconds: a collector is lost if it sends nothing for this long while the hub listens.
    """

    def __init__(self, host: str, *, silence_seconds: float = 12.0) -> None:
        hub_public, hub_secret = zmq.curve_keypair()
        collector_public, collector_secret = zmq.curve_keypair()
        self.run_key = (hub_public + collector_secret).decode()
        self._silence_seconds = silence_seconds
        # For each node, the seconds that the hub has listened since the last message
        self._silence: dict[int, float] = {}
        self._inbox: deque[tuple[int, FromCollector]] = deque()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(credentials_provider=_OneKey(collector_public))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = hub_secret
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        # Unlimited queues, because no message may be dropped. The number of outstanding requests
        # bounds their length.
        self._socket.sndhwm = 0
        self._socket.rcvhwm = 0
        self._socket.router_mandatory = True  # sending to a collector that is gone raises
        self._socket.linger = _LINGER_MILLISECONDS
        self._socket.bind(f"tcp://{host}:*")
        port = int(self._socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.address = (host, port)

    @property
    def nodes(self) -> list[int]:
        """Nodes whose collectors have connected, ascending."""
        return sorted(self._silence)

    def wait_for(self, num_nodes: int, deadline_seconds: float) -> None:
        """Block until every node's collector has connected. Raises `CollectorLost`."""
        deadline = time.monotonic() + deadline_seconds
        while len(self._silence) < num_nodes:
            if time.monotonic() > deadline:
                raise CollectorLost(
                    f"{len(self._silence)} of {num_nodes} collectors connected to {self.address} "
                    f"within {deadline_seconds:g} s; see the collector logs in the run directory"
                )
            self._receive(0.1)

    def send(self, node: int, message: ToCollector) -> None:
        """Send without waiting for delivery. Raises `CollectorLost`."""
        try:
            self._socket.send_multipart([_routing_id(node), msgspec.msgpack.encode(message)])
        except zmq.ZMQError as error:
            raise CollectorLost(
                f"the collector of node {node} is gone: {error}; {_log_hint(node)}"
            ) from error

    def poll(self, timeout_seconds: float) -> tuple[int, FromCollector] | None:
        """Return the next message with its node, or None after the timeout.

        Raises `CollectorLost`.
        """
        if not self._inbox:
            self._receive(timeout_seconds)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        """Deliver pending messages for one second at most, then stop listening."""
        self._socket.close()
        self._authenticator.stop()
        self._context.term()

    def _receive(self, timeout_seconds: float) -> None:
        """Wait for messages, receive all that have arrived, and count the silence of the others."""
        start = time.monotonic()
        active_nodes = set()
        if self._socket.poll(int(timeout_seconds * 1000)):
            while self._socket.poll(0):
                active_nodes.add(self._accept(*self._socket.recv_multipart()))
        # If this process was suspended, the clock has advanced by more than the timeout. Only the
        # time that it listened counts as silence.
        listening_seconds = min(time.monotonic() - start, timeout_seconds)
        for node, seconds in self._silence.items():
            self._silence[node] = 0.0 if node in active_nodes else seconds + listening_seconds
        for node, seconds in self._silence.items():
            if seconds > self._silence_seconds:
                raise CollectorLost(
                    f"the collector of node {node} was not heard for {seconds:.0f} s: it is "
                    "stopped, cut off, or its scorer or environment blocks it; "
                    f"{_log_hint(node)}"
                )

    def _accept(self, sender: bytes, *body: bytes) -> int:
        """Decode a message, put it into the inbox and return its node."""
        try:
            node = int(sender)
            message = _decoder.decode(b"".join(body))
        except (ValueError, msgspec.MsgspecError) as error:
            name = sender.decode(errors="replace")
            raise CollectorLost(
                f"the collector of node {name} sent an invalid message ({error}); {_log_hint(name)}"
            ) from error
        self._silence.setdefault(node, 0.0)
        if not isinstance(message, Alive):
            self._inbox.append((node, message))
        return node


class _OneKey:
    """Credentials provider that accepts one public key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public_key


def _routing_id(node: int) -> bytes:
    return str(node).encode()


def _log_hint(node: int | str) -> str:
    return f"see logs/collector-{node}.log in the run directory"
