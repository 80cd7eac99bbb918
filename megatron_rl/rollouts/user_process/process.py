"""One process of a user-defined class, as the collector sees it."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from megatron_rl.contracts.plugins import PluginError
from megatron_rl.records.reminder import Reminder
from megatron_rl.rollouts.user_process.current_call import CurrentCall
from megatron_rl.rollouts.user_process.frames import (
    FrameConnection,
    FrameError,
    encode_frame,
    receive_frame,
)
from megatron_rl.rollouts.user_process.messages import (
    ClassFailure,
    ClassReady,
    FromProcess,
    OpenClass,
    QuickAction,
    ToProcess,
)
from sglang_bridge.errors import describe_exit
from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.supervised_tree import SupervisedTree

_MODULE = "megatron_rl.rollouts.user_process"
_POLL_SECONDS = 0.25
# From SIGTERM to SIGKILL
_GRACE_SECONDS = 0.5
_END_SECONDS = 5.0
_FINISH_SECONDS = 1.0
# A class that ends by itself has its exit code after so long.
_EXIT_CODE_SECONDS = 2.0

from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
quick_action: msgspec.msgpack.Decoder[QuickAction] = msgspec.msgpack.Decoder(QuickAction)


class UserProcess:
    """A process that holds one user-defined class, under a supervisor.

    The supervisor ends everything below it: when the process ends, when the collector ends, and on
    `end`. Processes that the class has started and that left its session are found too.

    name: key and name of the class, for messages. lifeline: the process ends with it.
    """

    def __init__(self, name: str, settings: OpenClass, *, lifeline: Lifeline) -> None:
        self.name = name
        self.current = CurrentCall.create()
        self._tree = SupervisedTree()
        self._lock = threading.Lock()
        # For calls and for actions, once an event loop uses them
        self._connections: list[FrameConnection] = []
        self._calls, calls = socket.socketpair()
        self._actions, actions = socket.socketpair()
        descriptors = (calls.fileno(), actions.fileno(), self.current.descriptor)
        command = [sys.executable, "-m", _MODULE, *map(str, descriptors)]

        def start() -> subprocess.Popen[bytes]:
            return start_supervised(
                command,
                lifeline=lifeline,
                environment=os.environ,
                grace_seconds=_GRACE_SECONDS,
                descriptors=descriptors,
            )

        try:
            self._tree.start(start)
        finally:
            calls.close()
            actions.close()
        self._calls.sendall(encode_frame(settings))

    def wait_until_open(
        self,
        timeout_s: float,
        say: Callable[[str], None],
        *,
        is_unwanted: Callable[[], bool] = lambda: False,
    ) -> ClassReady:
        """Wait until the class is constructed.

        say: receives a line when this takes long. is_unwanted: True if nobody needs it any more.

        Raises `PluginError` if the class cannot be opened, ends its process, or takes longer than
        `timeout_s`. The caller then ends this process.
        """
        reminder = Reminder()
        while not select.select([self._calls], [], [], _POLL_SECONDS)[0]:
            if reminder.seconds > timeout_s:
                raise PluginError(
                    f"{self.name}: its constructor did not return within "
                    f"parallel.timeout_s={timeout_s:g}. Make it faster, or raise the limit"
                )
            if is_unwanted():
                raise PluginError(f"{self.name}: the collector ends")
            if reminder.is_due():
                say(f"waiting for the constructor of {self.name} for {reminder.seconds:.0f} s")
        try:
            message = from_process.decode(receive_frame(self._calls))
        except (OSError, FrameError, msgspec.MsgspecError) as error:
            raise PluginError(
                f"{self.name}: its process ended before the class was constructed "
                f"({self.wait_for_exit()}); the log of the collector holds its output"
            ) from error
        if isinstance(message, ClassReady):
            return message
        reason = message.reason if isinstance(message, ClassFailure) else "it sent another message"
        raise PluginError(reason)

    async def connect(
        self,
        receive: Callable[[FromProcess], None],
        perform: Callable[[QuickAction], ToProcess],
        lose: Callable[[str], None],
    ) -> None:
        """Exchange messages in this event loop from now on.

        perform: returns the answer to an action. lose: called once when the connection ends.
        """

        def answer(body: bytes) -> None:
            self._connections[1].send(perform(quick_action.decode(body)))

        calls = await FrameConnection.open(
            self._calls, lambda body: receive(from_process.decode(body)), lose
        )
        self._connections = [calls]
        self._connections.append(await FrameConnection.open(self._actions, answer, lose))

    def send(self, message: ToProcess) -> None:
        """Send a message. Does nothing once the connection has ended."""
        self._connections[0].send(message)

    def wait_for_exit(self) -> str:
        """Wait until the process has ended, for seconds at most, and describe how."""
        deadline = time.monotonic() + _EXIT_CODE_SECONDS
        while self._tree.exit_code is None:
            if time.monotonic() > deadline:
                return "it closed its connection"
            time.sleep(0.02)
        return describe_exit(self._tree.exit_code)

    def request_end(self) -> None:
        """Begin to end all its processes, and do not wait."""
        self._tree.request_end()

    def disconnect(self) -> None:
        """Close the connections. The process ends by itself if its code lets it."""
        for connection in self._connections or (self._calls, self._actions):
            connection.close()

    def finish(self) -> None:
        """Let a process that is disconnected end by itself for a second, then end it.

        Its handlers for the end of the interpreter run.
        """
        deadline = time.monotonic() + _FINISH_SECONDS
        while self._tree.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.02)
        self.end()

    def end(self) -> None:
        """End all its processes, and return when none is left. You may call it again."""
        self._tree.close(_END_SECONDS)
        with self._lock:
            for connection in (self._calls, self._actions):
                connection.close()
            self.current.close()
