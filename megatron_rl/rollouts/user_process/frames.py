"""Frames on a connection between two processes: a length of four bytes and MessagePack."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator

import msgspec

# An environment adds texts of this length at most.
MAX_FRAME_BYTES = 64 * 1024 * 1024
_HEADER_BYTES = 4


class FrameError(ValueError):
    """A frame that is too long. What follows it cannot be read."""


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return a message as a frame. Raises what msgspec raises, and `FrameError`."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(body)} bytes are more than the {MAX_FRAME_BYTES} of a message")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


class FrameSplitter:
    """Finds the frames in a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def split(self, data: bytes) -> Iterator[bytes]:
        """Add bytes and yield the bodies of all complete frames. Raises `FrameError`."""
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= _HEADER_BYTES:
            begin = start + _HEADER_BYTES
            length = int.from_bytes(self._buffer[start:begin], "big")
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
            if len(self._buffer) < begin + length:
                break
            yield bytes(self._buffer[begin : begin + length])
            start = begin + length
        del self._buffer[:start]


def receive_frame(connection: socket.socket) -> bytes:
    """Return the body of the next frame of a blocking socket.

    Raises `FrameError`, and `OSError` at the end of the connection.
    """
    length = int.from_bytes(_receive_exactly(connection, _HEADER_BYTES), "big")
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes, at most {MAX_FRAME_BYTES}")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("the other process closed the connection")
        data += part
    return bytes(data)


class FrameConnection(asyncio.Protocol):
    """One end of a connection in an event loop.

    receive: takes the body of each frame. An exception of msgspec ends the connection.
    end: called once when the connection has ended, with the reason.
    """

    def __init__(self, receive: Callable[[bytes], None], end: Callable[[str], None]) -> None:
        self._receive = receive
        self._end = end
        self._splitter = FrameSplitter()
        self._transport: asyncio.Transport | None = None
        self._reason = "it closed its connection"

    @classmethod
    async def open(
        cls, connection: socket.socket, receive: Callable[[bytes], None], end: Callable[[str], None]
    ) -> FrameConnection:
        """Read a connected socket from now on."""
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_unix_connection(lambda: cls(receive, end), sock=connection)
        return protocol

    def send(self, message: msgspec.Struct) -> None:
        """Send a message. Does nothing after the end of the connection."""
        frame = encode_frame(message)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def close(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.split(data):
                self._receive(body)
        except (FrameError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._reason = f"it sent an invalid message ({error})"
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self._reason)
