"""Connection of rank 0 to the collectors."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.rollouts.wire.messages import (
    MAX_MESSAGE_BYTES,
    Alive,
    FromCollector,
    Stop,
    ToCollector,
    collector_name,
)

_LINGER_MILLISECONDS = 1000

_decoder: msgspec.msgpack.Decoder[FromCollector] = msgspec.msgpack.Decoder(FromCollector)


@dataclass(frozen=True)
class CollectorConnected:
    """The collector of a node has connected. epoch: counts its starts."""

    epoch: int


@dataclass(frozen=True)
class CollectorGone:
    """The collector of a node ended, fell silent, or sent an invalid message.

    Nothing that it sends later is delivered.
    """

    epoch: int
    reason: str


Event = FromCollector | CollectorConnected | CollectorGone


@dataclass
class _Peer:
    """A connected collector. silence: seconds that the hub has listened since its last message."""

    epoch: int
    silence: float = 0.0


class CollectorHub:
    """Exchanges messages with the collectors that hold the run's key.

    The traffic is encrypted (CURVE). A node has one collector at a time, the one with the highest
    epoch.

    address: host and port.
    run_key: a secret that a collector needs to connect.
    silence_seconds: a collector is gone if it sends nothing for this long while the hub listens.
    """

    def __init__(self, host: str, *, silence_seconds: float = 12.0) -> None:
        hub_public, hub_secret = zmq.curve_keypair()
        collector_public, collector_secret = zmq.curve_keypair()
        self.run_key = (hub_public + collector_secret).decode()
        self._silence_seconds = silence_seconds
        self._peers: dict[int, _Peer] = {}
        self._gone_epochs: dict[int, int] = {}  # by node, the last epoch that is gone
        self._inbox: deque[tuple[int, Event]] = deque()
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
        """Nodes whose collectors are connected, ascending."""
        return sorted(self._peers)

    def epoch(self, node: int) -> int | None:
        """Return the epoch of the collector that is connected, None if none is."""
        peer = self._peers.get(node)
        return None if peer is None else peer.epoch

    def wait_for(self, num_nodes: int, deadline_seconds: float) -> None:
        """Block until every node's collector has connected. Raises `Failure`."""
        deadline = time.monotonic() + deadline_seconds
        while len(self._peers) < num_nodes:
            if time.monotonic() > deadline:
                raise Failure(
                    f"{len(self._peers)} of {num_nodes} collectors connected to {self.address} "
                    f"within {deadline_seconds:g} s; see the collector logs in the run directory",
                    ExitCode.ENGINE_FAILED,
                )
            self._receive(0.1)

    def send(self, node: int, message: ToCollector) -> None:
        """Send without waiting for delivery.

        If the collector is gone, the message is dropped, and `poll` returns `CollectorGone`.
        """
        self.send_to_each([node], message)

    def send_to_each(self, nodes: Iterable[int], message: ToCollector) -> None:
        """Send one message to several nodes, as `send` does. It is encoded once."""
        data = msgspec.msgpack.encode(message)
        for node in nodes:
            self._send_data(node, data)

    def _send_data(self, node: int, data: bytes) -> None:
        peer = self._peers.get(node)
        if peer is None:
            return
        try:
            self._send_to(node, peer.epoch, data)
        except zmq.ZMQError as error:
            # What it sent before it ended comes first: it may be the reason
            self._receive_pending()
            self.disconnect(node, peer.epoch, f"is gone: {error}")

    def disconnect(self, node: int, epoch: int, reason: str) -> None:
        """Deliver nothing more of a collector, and end it if it lives. Later calls do nothing."""
        peer = self._peers.get(node)
        if peer is None or peer.epoch != epoch:
            return
        del self._peers[node]
        self._gone_epochs[node] = epoch
        self._stop_peer(node, epoch)
        text = f"the collector of node {node} {reason}; {_log_hint(node)}"
        self._inbox.append((node, CollectorGone(epoch, text)))

    def poll(self, timeout_seconds: float) -> tuple[int, Event] | None:
        """Return the next message or event with its node, or None after the timeout."""
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
        active_nodes: set[int] = set()
        if self._socket.poll(int(timeout_seconds * 1000)):
            active_nodes = self._receive_pending()
        # If this process was suspended, the clock has advanced by more than the timeout. Only the
        # time that it listened counts as silence.
        listening_seconds = min(time.monotonic() - start, timeout_seconds)
        for node, peer in list(self._peers.items()):
            peer.silence = 0.0 if node in active_nodes else peer.silence + listening_seconds
            if peer.silence > self._silence_seconds:
                self.disconnect(
                    node,
                    peer.epoch,
                    f"was not heard for {peer.silence:.0f} s: it is stopped or cut off",
                )

    def _receive_pending(self) -> set[int]:
        """Receive what has arrived, and return the nodes that sent it."""
        active_nodes = set()
        while self._socket.poll(0):
            node = self._accept(*self._socket.recv_multipart())
            if node is not None:
                active_nodes.add(node)
        return active_nodes

    def _accept(self, sender: bytes, *body: bytes) -> int | None:
        """Decode a message, put it into the inbox and return its node.

        Returns None for a collector that is gone.
        """
        node, epoch = _node_and_epoch(sender)
        if not self._is_current(node, epoch):
            self._stop_peer(node, epoch)
            return None
        try:
            message = _decoder.decode(b"".join(body))
        except msgspec.MsgspecError as error:
            self.disconnect(node, epoch, f"sent an invalid message ({error})")
            return None
        if message != Alive():
            self._inbox.append((node, message))
        return node

    def _is_current(self, node: int, epoch: int) -> bool:
        """Return False for a collector that is gone. One of a higher epoch replaces another."""
        peer = self._peers.get(node)
        if peer is not None and peer.epoch == epoch:
            return True
        last_epoch = self._gone_epochs.get(node, -1) if peer is None else peer.epoch
        if epoch <= last_epoch:
            return False
        if peer is not None:
            self.disconnect(node, peer.epoch, "was replaced by a new one")
        self._peers[node] = _Peer(epoch)
        self._inbox.append((node, CollectorConnected(epoch)))
        return True

    def _stop_peer(self, node: int, epoch: int) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it has ended
            self._send_to(node, epoch, msgspec.msgpack.encode(Stop()))

    def _send_to(self, node: int, epoch: int, data: bytes) -> None:
        address = collector_name(node, epoch).encode()
        self._socket.send_multipart([address, data])


class _OneKey:
    """Credentials provider that accepts one public key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public_key


def _node_and_epoch(sender: bytes) -> tuple[int, int]:
    """Read the name of a collector. Raises `Failure` for a peer that is no collector."""
    try:
        node, epoch = sender.split(b".")
        return int(node), int(epoch)
    except ValueError as error:
        name = sender.decode(errors="replace")
        raise Failure(
            f"a collector with the invalid name {name!r} has connected", ExitCode.ENGINE_FAILED
        ) from error


def _log_hint(node: int) -> str:
    return f"see logs/collector-{node}.log in the run directory"
