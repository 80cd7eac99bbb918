"""Starts programs: under bubblewrap, or without namespaces."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import subprocess
import tempfile
from collections.abc import AsyncIterator
from functools import cache
from pathlib import Path

import msgspec

from megatron_rl.rewards.sandbox import bootstrap
from megatron_rl.rewards.sandbox.bubblewrap import (
    FILES,
    Interpreter,
    bubblewrap_command,
    draw_id,
    has_free_ids,
)
from megatron_rl.rewards.sandbox.control_groups import ControlGroup
from megatron_rl.rewards.sandbox.limits import MIB, Limits
from megatron_rl.rewards.sandbox.process import SandboxProcess, wait_readable
from megatron_rl.rewards.sandbox.seccomp import filter_program

_PIECE = 4096


class _Info(msgspec.Struct, rename="kebab"):
    """The process ids of a sandbox, as bubblewrap writes them."""

    child_pid: int


class StrictLauncher:
    """Starts each program under bubblewrap, in namespaces of its own.

    bubblewrap: its path. Its environment is empty, because programs could read it.
    """

    def __init__(self, bubblewrap: str, limits: Limits) -> None:
        self._bubblewrap = bubblewrap
        self._limits = limits
        self._interpreter = Interpreter.find()
        self._filter = filter_program(platform.machine()) or b""
        self._has_free_ids = has_free_ids()

    @contextlib.asynccontextmanager
    async def start(self, length: int, group: ControlGroup) -> AsyncIterator[SandboxProcess]:
        """Start bubblewrap. Its first process is in the group before it has children."""
        with contextlib.ExitStack() as files:
            seccomp = _pipe_with(self._filter, files)
            info, info_end = _pipe(files)
            block_end, block = _pipe(files)
            child_ends = (seccomp, info_end, block_end)
            namespaces = bubblewrap_command(
                self._bubblewrap,
                self._interpreter,
                self._limits,
                seccomp=seccomp.fileno(),
                info=info_end.fileno(),
                block=block_end.fileno(),
            )
            command = [*namespaces, *self._interpreter.command(_code()), *self._arguments(length)]
            process = _open_process(command, "/", child_ends)
            try:
                for end in child_ends:
                    end.close()
                first = await _read_first_process(info)
                if first is not None:
                    process.set_first(first)
                    group.add(first)
                block.close()
                yield process
            finally:
                await process.end()

    def _arguments(self, length: int) -> list[str]:
        arguments = _arguments(self._limits, length)
        arguments += [f"threads={self._limits.threads}", "read=/", f"write={FILES}"]
        return [*arguments, f"id={draw_id()}"] if self._has_free_ids else arguments


class WeakLauncher:
    """Starts each program as a child of this process, without namespaces.

    It has the limits, seccomp and Landlock where the kernel has it. It is no protection against
    hostile code: the program runs as the user of this process.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._interpreter = Interpreter.find()
        self._filter = filter_program(platform.machine())

    @contextlib.asynccontextmanager
    async def start(self, length: int, group: ControlGroup) -> AsyncIterator[SandboxProcess]:
        """Start the interpreter in a folder of its own, which is removed at the end."""
        with tempfile.TemporaryDirectory(prefix="program-") as folder:
            command = [*self._interpreter.command(_code()), *self._arguments(length, folder)]
            process = _open_process(command, folder)
            try:
                group.add(process.number)
                yield process
            finally:
                await process.end()

    def _arguments(self, length: int, folder: str) -> list[str]:
        arguments = _arguments(self._limits, length)
        arguments += [f"read={':'.join(self._interpreter.folders)}", f"write={folder}"]
        arguments.append(f"parent={os.getpid()}")
        return arguments if self._filter is None else [*arguments, f"seccomp={self._filter.hex()}"]


def _arguments(limits: Limits, length: int) -> list[str]:
    return [
        f"length={length}",
        f"cpu={limits.cpu_s}",
        f"memory={limits.memory_mb * MIB}",
        f"files={limits.files_mb * MIB}",
    ]


def _open_process(
    command: list[str], folder: str, files: tuple[io.FileIO, ...] = ()
) -> SandboxProcess:
    """Start a process that inherits no environment, and of the files only those that it needs."""
    return SandboxProcess(
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={},
            cwd=folder,
            start_new_session=True,
            pass_fds=[file.fileno() for file in files],
        )
    )


@cache
def _code() -> str:
    return Path(bootstrap.__file__).read_text()


def _pipe(files: contextlib.ExitStack) -> tuple[io.FileIO, io.FileIO]:
    """Open a pipe, whose ends may be closed before the stack closes them."""
    output, entry = os.pipe()
    return (
        files.enter_context(io.FileIO(output, "rb")),
        files.enter_context(io.FileIO(entry, "wb")),
    )


def _pipe_with(data: bytes, files: contextlib.ExitStack) -> io.FileIO:
    """Open a pipe that holds some data."""
    output, entry = _pipe(files)
    entry.write(data)
    entry.close()
    return output


async def _read_first_process(info: io.FileIO) -> int | None:
    """Read the id of a sandbox's first process, None if bubblewrap failed."""
    text = b""
    while not text.rstrip().endswith(b"}"):
        await wait_readable(info.fileno())
        piece = info.read(_PIECE)
        if not piece:
            return None
        text += piece
    return msgspec.json.decode(text, type=_Info).child_pid
