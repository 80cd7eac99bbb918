"""Frames over a stream socket, read without blocking."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from megatron_rl.rollouts.messages import MAX_FRAME_BYTES

_CHUNK = 1 << 16


class ConnectionEnded(ConnectionError):
    """The peer closed the connection."""


class FrameReader:
    """Splits a byte stream into frames of at most `max_bytes`."""

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self.max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield every frame that is now complete."""
        self._buffer += data
        while len(self._buffer) >= 4:
            length = int.from_bytes(self._buffer[:4], "big")
            if length > self.max_bytes:
                raise ConnectionError(f"a frame of {length} bytes; the limit is {self.max_bytes}")
            if len(self._buffer) < 4 + length:
                return
            body = bytes(self._buffer[4 : 4 + length])
            del self._buffer[: 4 + length]
            yield body


def receive_available(connection: socket.socket, reader: FrameReader) -> list[bytes]:
    """Read what one readiness event announced. Raises `ConnectionEnded` when the peer is gone."""
    try:
        data = connection.recv(_CHUNK)
    except (ConnectionResetError, TimeoutError) as error:
        raise ConnectionEnded(str(error)) from error
    if not data:
        raise ConnectionEnded("the peer closed the connection")
    return list(reader.feed(data))
