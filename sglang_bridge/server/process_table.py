"""Processes of this machine as /proc shows them.

A process that has ended is nobody, and no error.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from sglang_bridge.server.supervise import descendants

_ENDED = ("", "Z", "X")
_FLAGS_FIELD, _START_FIELD = 6, 19  # counted from the state, which follows the name in brackets
_EXITING = 0x4  # among a process's flags (PF_EXITING)


class Process(NamedTuple):
    """A process id and the clock tick of its start: ids are used again."""

    pid: int
    started: str


def state(pid: int) -> str:
    """One letter, as in `ps`: T is stopped, Z a zombie; empty for a process that is gone."""
    return next(iter(_fields(pid)), "")


def lives(pid: int) -> bool:
    """Whether a process runs or could; a zombie does not."""
    return state(pid) not in _ENDED


def children(pid: int) -> list[int]:
    """Direct children of a process."""
    found = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(child) for child in file.read_text().split()]
    return found


def variable(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with."""
    prefix = f"{name}=".encode()
    entries = _environment(pid).split(b"\0")
    return next(
        (entry[len(prefix) :].decode() for entry in entries if entry.startswith(prefix)), None
    )


def starting(pid: int) -> bool:
    """Whether a process is between its fork and its program: the kernel does not show its
    environment yet.
    """
    if _environment(pid):
        return False
    fields = _fields(
        pid
    )  # looked at later: the environment of a process that ends is gone before it is
    return bool(fields) and not int(fields[_FLAGS_FIELD]) & _EXITING


def tree(pid: int) -> list[Process]:
    """A process and everything below it."""
    return [Process(p, _start(p)) for p in (pid, *descendants(pid))]


def kill(processes: Iterable[Process]) -> None:
    """SIGKILL, which also ends what is stopped."""
    for process in processes:
        if process.started and _start(process.pid) == process.started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)


def _environment(pid: int) -> bytes:
    """As the process was started with it, each variable ended by a zero byte; empty where it cannot
    be read.
    """
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def _start(pid: int) -> str:
    return next(iter(_fields(pid)[_START_FIELD:]), "")


def _fields(pid: int) -> list[str]:
    """What follows the name in /proc/PID/stat; the name may hold blanks and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
