"""A child process that makes one synchronous call at a time, within limits of CPU time and memory.

The kernel counts the CPU time and ends the child, so that a call also ends inside of C code, such
as a regular expression that backtracks or a power of large numbers. Python would not interrupt it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import NoReturn

import msgspec

_HEADER_BYTES = 4
_MAX_FRAME_BYTES = 64 * 1024 * 1024
_PAGE_BYTES = resource.getpagesize()
_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = 77  # exit code
_MONITORING_TOOL = 4  # a number that neither debuggers nor profilers of Python use
# Caches of a library, such as sympy's, grow with every new answer. A child that has grown by so
# much is replaced between two calls, which takes milliseconds, and the next one begins small again.
_MAX_GROWTH_BYTES = 32 * 1024 * 1024

Function = Callable[[bytes], bytes]


class _Reply(msgspec.Struct, frozen=True):
    """The end of a call. error: what it raised. is_last: the child ends and takes no more calls."""

    result: bytes = b""
    error: str = ""
    is_last: bool = False


class Worker:
    """Makes calls of a function in a child process, which is forked from this one.

    The child shares the imported libraries with this process, so that a new one takes milliseconds.
    It starts with the first call, and is replaced after each call that was killed. It ends with
    this process. It can write no file.

    function: gets and returns bytes. cpu_seconds: CPU time of a call. memory_bytes: address space
    that the child may take beyond that of this process.
    """

    def __init__(self, function: Function, *, cpu_seconds: float, memory_bytes: int) -> None:
        self._function = function
        self._cpu_seconds = cpu_seconds
        self._memory_bytes = memory_bytes
        self._turn = asyncio.Lock()
        self._connection: socket.socket | None = None
        self.pid = 0  # of the child, 0 for none

    async def call(self, request: bytes) -> bytes:
        """Call the function. Another call waits for its end. Cancelling this kills the child.

        Raises TimeoutError and MemoryError for a call beyond its limits, `ChildProcessError` for
        one that ends the child in another way, and RuntimeError for one that raises.
        """
        async with self._turn:
            try:
                reply = await self._exchange(request)
            except OSError:
                raise self._describe(self._end()) from None
            except BaseException:
                self._end()
                raise
            if reply.is_last:
                self._end()
        if reply.error:
            raise RuntimeError(reply.error)
        return reply.result

    def close(self) -> None:
        """End the child. A later call starts another one."""
        self._end()

    async def _exchange(self, request: bytes) -> _Reply:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._connection, _frame(request))
        header = await _receive(self._connection, _HEADER_BYTES)
        body = await _receive(self._connection, int.from_bytes(header, "big"))
        return msgspec.msgpack.decode(body, type=_Reply)

    def _start(self) -> None:
        """Fork the child."""
        mine, connection = socket.socketpair()
        mine.setblocking(False)
        parent = os.getpid()
        with warnings.catch_warnings():
            # Python warns about other threads, whose locks stay locked in the child. The child
            # takes none of them: it computes, and reads and writes one socket.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            _run_child(self._function, connection, parent, self._cpu_seconds, self._memory_bytes)
        connection.close()
        self._connection = mine
        self.pid = pid

    def _end(self) -> int:
        """Kill the child, and return its exit code, or the negative number of the signal."""
        if self._connection is None:
            return 0
        self._connection.close()
        self._connection = None
        # A child that is ending keeps the exit code that it has
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def _describe(self, exit_code: int) -> OSError | MemoryError:
        """Return the error of a call that has ended its child."""
        if exit_code == -signal.SIGPROF:
            return TimeoutError(f"the call took more than {self._cpu_seconds:g} s of CPU time")
        if exit_code == _OUT_OF_MEMORY:
            return MemoryError(f"the call took more than {self._memory_bytes >> 20} MiB of memory")
        return ChildProcessError(f"the call ended its process with exit code {exit_code}")


def _frame(body: bytes) -> bytes:
    if len(body) > _MAX_FRAME_BYTES:
        raise ValueError(f"{len(body)} bytes are more than the {_MAX_FRAME_BYTES} of a message")
    return len(body).to_bytes(_HEADER_BYTES, "big") + body


async def _receive(connection: socket.socket, count: int) -> bytes:
    """Read exactly so many bytes. Raises `ConnectionError` at the end of the connection."""
    if count > _MAX_FRAME_BYTES:
        raise ConnectionError(f"a reply of {count} bytes")
    data = bytearray(count)
    view = memoryview(data)
    while view:
        length = await asyncio.get_running_loop().sock_recv_into(connection, view)
        if length == 0:
            raise ConnectionError("the child has ended")
        view = view[length:]
    return bytes(data)


def _run_child(
    function: Function,
    connection: socket.socket,
    parent: int,
    cpu_seconds: float,
    memory_bytes: int,
) -> NoReturn:
    """Answer calls until the parent closes the connection."""
    try:
        _leave_parent(connection, parent)
        _limit(memory_bytes)
        bound = _resident_bytes() + _MAX_GROWTH_BYTES
        file = connection.makefile("rb")
        while header := file.read(_HEADER_BYTES):
            reply = _call(function, file.read(int.from_bytes(header, "big")), cpu_seconds, bound)
            connection.sendall(_frame(msgspec.msgpack.encode(reply)))
    except BaseException:
        os._exit(1)
    os._exit(0)


def _leave_parent(connection: socket.socket, parent: int) -> None:
    """End with the parent, and let go of its files, its signal handlers and its garbage."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the parent, too
    for number in (signal.SIGTERM, signal.SIGPROF):
        signal.signal(number, signal.SIG_DFL)
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    # Libraries log whole answers
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, the process ends with it
    for descriptor in range(3):
        os.dup2(sys.stdout.fileno(), descriptor)
    gc.freeze()  # a collection would copy the pages that the child shares with the parent


def _limit(memory_bytes: int) -> None:
    """Limit the address space, and write no file."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * _PAGE_BYTES
    for limit, value in (
        (resource.RLIMIT_AS, size + memory_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))

    # Libraries catch `Exception`, and would make a result of a call that has run out of memory.
    def end(code: CodeType, offset: int, error: BaseException) -> None:
        if isinstance(error, MemoryError):
            os._exit(_OUT_OF_MEMORY)

    monitoring = sys.monitoring
    monitoring.use_tool_id(_MONITORING_TOOL, "memory limit")
    monitoring.register_callback(_MONITORING_TOOL, monitoring.events.RAISE, end)
    monitoring.set_events(_MONITORING_TOOL, monitoring.events.RAISE)


def _call(function: Function, request: bytes, cpu_seconds: float, bound: int) -> _Reply:
    """Make a call. bound: resident bytes beyond which it is the last one."""
    with _cpu_limit(cpu_seconds):
        try:
            reply = _Reply(function(request))
        except Exception as error:
            reply = _Reply(error=f"{type(error).__name__}: {error}")
    return msgspec.structs.replace(reply, is_last=_resident_bytes() > bound)


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Let the kernel end this process after so many seconds of CPU time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
