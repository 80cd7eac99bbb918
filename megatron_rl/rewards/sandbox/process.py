"""The process of one program, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from typing import IO

from megatron_rl.rewards.sandbox.bootstrap import READY

_PIECE = 65536
_MAX_MESSAGE = 500


class SandboxProcess:
    """A process with pipes that runs a program. The program comes first on its standard input."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.number = process.pid
        self._process = process
        self._end = os.pidfd_open(process.pid)
        # Of the first process of its namespace, with which the kernel ends all others there
        self._first: int | None = None
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)

    def set_first(self, process: int) -> None:
        """Tell the first process of the namespace of the program."""
        self._first = os.pidfd_open(process)

    async def exchange(self, data: bytes, limit: int) -> tuple[bytes, bool]:
        """Write all of standard input, and read standard output up to a limit of bytes.

        Returns the output, and True if it was longer than the limit.

        Raises RuntimeError if the sandbox fails before the program starts.
        """
        writer = asyncio.create_task(self._write(data))
        try:
            output = await self._read(limit + len(READY))
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        if not output.startswith(READY):
            raise RuntimeError(f"the sandbox did not start: {self._message()}")
        output = output[len(READY) :]
        return output[:limit], len(output) > limit

    async def wait(self) -> int:
        """Wait for the end, and return the exit code as a shell shows it."""
        await wait_readable(self._end)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    async def end(self) -> None:
        """Kill the process and all below it, and wait until none is left."""
        with contextlib.suppress(ProcessLookupError):
            if self._first is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        try:
            if self._first is not None:
                await wait_readable(self._first)
            await self.wait()
        finally:
            self._close()

    def _close(self) -> None:
        for file in (self._first, self._end):
            if file is not None:
                os.close(file)
        for pipe in self._pipes():
            pipe.close()

    def _pipes(self) -> Iterator[IO[bytes]]:
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            yield pipe

    async def _read(self, limit: int) -> bytes:
        """Read up to the end, or until there is more than a limit of bytes."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        output = bytearray()
        while len(output) <= limit:
            try:
                piece = os.read(file, _PIECE)
            except BlockingIOError:
                await wait_readable(file)
                continue
            if not piece:
                break
            output += piece
        return bytes(output)

    async def _write(self, data: bytes) -> None:
        assert self._process.stdin is not None
        file = self._process.stdin.fileno()
        rest = memoryview(data)
        with contextlib.suppress(BrokenPipeError), self._process.stdin:
            while rest:
                try:
                    rest = rest[os.write(file, rest) :]
                except BlockingIOError:
                    await wait_writable(file)

    def _message(self) -> str:
        """Return the last words of bubblewrap or the bootstrap."""
        assert self._process.stderr is not None
        text = b""
        with contextlib.suppress(BlockingIOError):
            text = os.read(self._process.stderr.fileno(), _PIECE)
        return text.decode("utf-8", "replace").strip()[-_MAX_MESSAGE:] or "it gave no reason"


async def wait_readable(file: int) -> None:
    """Wait until a file descriptor can be read, which a pidfd can at the end of its process."""
    loop = asyncio.get_running_loop()
    await _wait(file, loop.add_reader, loop.remove_reader)


async def wait_writable(file: int) -> None:
    """Wait until a file descriptor can be written."""
    loop = asyncio.get_running_loop()
    await _wait(file, loop.add_writer, loop.remove_writer)


async def _wait(
    file: int, add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], bool]
) -> None:
    event = asyncio.Event()
    add(file, event.set)
    try:
        await event.wait()
    finally:
        remove(file)
