"""A collector's end of the wire to rank 0."""

from __future__ import annotations

from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from megatron_rl.rollouts.messages import MAX_MESSAGE_BYTES, FromCollector, ToCollector

_KEY_CHARACTERS = 40  # of a CURVE key in its printable form (Z85)
_LINGER_MILLISECONDS = 1000

_decoder: msgspec.msgpack.Decoder[ToCollector] = msgspec.msgpack.Decoder(ToCollector)


class LinkLost(ConnectionError):
    """The connection to rank 0 ended, or was never accepted."""


def present_run_key(socket: zmq.Socket[Any], run_key: str) -> None:
    """Make a socket speak to the hub whose `run_key` this is, and to no other."""
    hub_public, secret = run_key[:_KEY_CHARACTERS].encode(), run_key[_KEY_CHARACTERS:].encode()
    socket.curve_serverkey = hub_public
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)


class Link:
    """Connects to the hub at host and port as the collector of `node`; run_key is the hub's."""

    def __init__(self, host: str, port: int, node: int, run_key: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        present_run_key(self._socket, run_key)
        self._socket.routing_id = str(node).encode()
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.reconnect_ivl = -1  # what was on its way would be lost silently
        self._socket.linger = _LINGER_MILLISECONDS
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(f"tcp://{host}:{port}")

    async def send(self, message: FromCollector) -> None:
        await self._socket.send(msgspec.msgpack.encode(message))

    async def receive(self) -> ToCollector:
        """The next message. Raises msgspec's errors for what is not one."""
        return _decoder.decode(await self._socket.recv())

    async def lost(self) -> None:
        """Wait until the connection ends, then raise `LinkLost`."""
        event = zmq.Event(parse_monitor_message(await self._monitor.recv_multipart())["event"])
        refused = event == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        raise LinkLost(
            "rank 0 does not know this collector's key"
            if refused
            else "the connection to rank 0 ended"
        )

    def close(self) -> None:
        """Deliver what was sent, for a second at most."""
        self._socket.disable_monitor()
        self._context.destroy()
