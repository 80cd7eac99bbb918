"""Connection of a collector to rank 0."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from megatron_rl.records.reminder import Reminder
from megatron_rl.rollouts.wire.messages import (
    MAX_MESSAGE_BYTES,
    FromCollector,
    ToCollector,
    collector_name,
)

_KEY_CHARACTERS = 40  # length of a CURVE key in its printable form (Z85)
_LINGER_MILLISECONDS = 1000
_CONNECT_MILLISECONDS = 5000
_RETRY_SECONDS = 1.0
_FAILED_ATTEMPTS = (
    zmq.EVENT_CLOSED,
    zmq.EVENT_DISCONNECTED,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
)

_decoder: msgspec.msgpack.Decoder[ToCollector] = msgspec.msgpack.Decoder(ToCollector)


class LinkLost(ConnectionError):
    """The connection to rank 0 ended, or rank 0 refused it."""


def present_run_key(socket: zmq.Socket[Any], run_key: str) -> None:
    """Let a socket connect to the hub whose `run_key` this is, and to no other."""
    hub_public = run_key[:_KEY_CHARACTERS].encode()
    secret = run_key[_KEY_CHARACTERS:].encode()
    socket.curve_serverkey = hub_public
    socket.curve_secretkey = secret
    socket.curve_publickey = zmq.curve_public(secret)


class CollectorLink:
    """Connects the collector of `node` to the hub at host and port.

    `wait_until_lost` has to run meanwhile. Until the first connection, it tries again and again.

    epoch: counts the starts of the node's collector. run_key: the hub's.
    """

    def __init__(self, host: str, port: int, node: int, epoch: int, run_key: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        present_run_key(self._socket, run_key)
        self._socket.routing_id = collector_name(node, epoch).encode()
        self._socket.maxmsgsize = MAX_MESSAGE_BYTES
        self._socket.sndhwm = 0
        self._socket.rcvhwm = 0
        # Without reconnects, because messages on their way would be lost silently
        self._socket.reconnect_ivl = -1
        self._socket.connect_timeout = _CONNECT_MILLISECONDS
        self._socket.linger = _LINGER_MILLISECONDS
        events = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
        for event in _FAILED_ATTEMPTS:
            events |= event
        self._monitor = self._socket.get_monitor_socket(events)
        self._endpoint = f"tcp://{host}:{port}"
        self._socket.connect(self._endpoint)

    async def send(self, message: FromCollector) -> None:
        """Send a message to rank 0."""
        await self._socket.send(msgspec.msgpack.encode(message))

    async def receive(self) -> ToCollector:
        """Return the next message. Raises msgspec's errors for an invalid one."""
        return _decoder.decode(await self._socket.recv())

    async def wait_until_lost(self) -> None:
        """Connect, wait until the connection ends, then raise `LinkLost`."""
        await self._connect()
        event = await self._next_event()
        while event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            event = await self._next_event()
        raise LinkLost("the connection to rank 0 ended")

    async def _connect(self) -> None:
        """Wait for the first connection, and try again if rank 0 cannot be reached.

        Only signs of life are lost meanwhile: rank 0 speaks first.
        """
        reminder = Reminder()
        while (event := await self._next_event()) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                raise LinkLost("rank 0 does not know this collector's key")
            if reminder.is_due():
                text = f"rank 0 was not reached at {self._endpoint} for {reminder.seconds:.0f} s"
                print(text, file=sys.stderr, flush=True)
            await asyncio.sleep(_RETRY_SECONDS)
            while await self._monitor.poll(0):  # one failure may be several events
                await self._next_event()
            self._socket.disconnect(self._endpoint)
            self._socket.connect(self._endpoint)

    async def _next_event(self) -> int:
        return int(parse_monitor_message(await self._monitor.recv_multipart())["event"])

    def close(self) -> None:
        """Deliver pending messages for one second at most, then close the connection."""
        self._socket.disable_monitor()
        self._context.destroy()
