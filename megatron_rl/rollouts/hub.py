"""Rank 0's end of the collector connections."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from megatron_rl.rollouts.frames import ConnectionEnded, FrameReader, receive_available
from megatron_rl.rollouts.messages import MAX_FRAME_BYTES, FromCollector, Hello, ToCollector, frame

_HELLO_BYTES = 4096  # before it has presented the key, a peer may not make us keep more

_decoder: msgspec.msgpack.Decoder[FromCollector] = msgspec.msgpack.Decoder(FromCollector)


class CollectorLost(RuntimeError):
    """A collector did not connect in time, or its connection ended."""


@dataclass
class _Peer:
    connection: socket.socket
    reader: FrameReader = field(default_factory=lambda: FrameReader(max_bytes=_HELLO_BYTES))
    node: int | None = None


class Hub:
    """Listens for collectors on one address; `poll` returns what they said."""

    def __init__(self, host: str, key: str) -> None:
        self._key = key
        self._listener = socket.create_server((host, 0))
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._peers: dict[int, _Peer] = {}
        self._inbox: deque[tuple[int, FromCollector]] = deque()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def nodes(self) -> list[int]:
        return sorted(self._peers)

    def wait_for(self, num_nodes: int, deadline_seconds: float) -> None:
        """Block until every node's collector has said hello. Raises `CollectorLost`."""
        deadline = time.monotonic() + deadline_seconds
        while len(self._peers) < num_nodes:
            if time.monotonic() > deadline:
                raise CollectorLost(
                    f"{len(self._peers)} of {num_nodes} collectors connected to {self.address} within "
                    f"{deadline_seconds:g} s; see the collector logs in the run directory"
                )
            self._receive(0.1)

    def send(self, node: int, message: ToCollector) -> None:
        try:
            self._peers[node].connection.sendall(frame(message))
        except OSError as error:
            raise CollectorLost(f"the collector of node {node} is gone: {error}") from error

    def poll(self, timeout_seconds: float) -> tuple[int, FromCollector] | None:
        """The next message and its node, or None after the timeout. Raises `CollectorLost`."""
        if not self._inbox:
            self._receive(timeout_seconds)
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _receive(self, timeout_seconds: float) -> None:
        for key, _ in self._selector.select(timeout_seconds):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _read(self, peer: _Peer) -> None:
        try:
            messages = [_decoder.decode(body) for body in receive_available(peer.connection, peer.reader)]
        except (ConnectionError, msgspec.MsgspecError) as error:
            self._drop(peer)
            if peer.node is None:
                return  # a stranger, or a collector of another run: it never presented the key
            lost = isinstance(error, ConnectionEnded)
            what = "ended" if lost else f"sent a message that is not one ({error})"
            raise CollectorLost(f"the collector of node {peer.node} {what}") from error
        for message in messages:
            if not self._handle(peer, message):
                self._drop(peer)
                return

    def _handle(self, peer: _Peer, message: FromCollector) -> bool:
        """Keep a known collector's message, or learn who a peer is; False for a stranger."""
        if peer.node is not None:
            self._inbox.append((peer.node, message))
        elif isinstance(message, Hello) and hmac.compare_digest(message.key.encode(), self._key.encode()):
            peer.node = message.node
            peer.reader.max_bytes = MAX_FRAME_BYTES
            self._peers[message.node] = peer
        else:
            return False
        return True

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.connection.close()
