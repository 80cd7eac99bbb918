"""Processes of this machine. A process that has ended raises no error: it has no state."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

_FLAGS_FIELD = 6  # counted from the state, which follows the name in brackets
_EXITING = 0x4  # the kernel's PF_EXITING
_POLL_SECONDS = 0.02


def is_alive(pid: int) -> bool:
    """True for a process that runs or could run, which a zombie cannot."""
    return _status(pid) not in ("", psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def is_stopped(pid: int) -> bool:
    """True for a process that a signal such as SIGSTOP has stopped."""
    return _status(pid) == psutil.STATUS_STOPPED


def is_starting(pid: int) -> bool:
    """True between a process's fork and exec, when the kernel does not show its environment yet."""
    if _environment(pid):
        return False
    # Read after the environment, because a process that exits loses its environment first.
    flags = _flags(pid)
    return flags is not None and not flags & _EXITING


def environment_variable(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with."""
    return _environment(pid).get(name)


def command_line(pid: int) -> list[str]:
    """The arguments that a process was started with, its program first."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).cmdline()
    return []


def children(pid: int) -> list[int]:
    """Direct children of a process, unreaped ones included."""
    # The kernel's own list: psutil reads every process of the machine to find a few children.
    pids = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            pids += [int(child) for child in file.read_text().split()]
    return pids


def descendants(pid: int, generations: int | None = None) -> list[int]:
    """Every living or unreaped process below `pid`, parents first.

    generations: how many, None for all.
    """
    if generations == 0:
        return []
    pids = []
    for child in children(pid):
        pids += [child, *descendants(child, None if generations is None else generations - 1)]
    return pids


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and everything below it. The objects know the start times: pids are reused."""
    processes = []
    for member in (pid, *descendants(pid)):
        with contextlib.suppress(psutil.Error):
            processes.append(psutil.Process(member))
    return processes


def kill(processes: Iterable[psutil.Process]) -> None:
    """SIGKILL, which also ends stopped processes."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def wait_for_end(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until none of them runs, at most `seconds`. Returns True if none does.

    It reaps no child, so that the exit codes of children stay known.
    """
    deadline = time.monotonic() + seconds
    remaining = [process for process in processes if _runs(process)]
    while remaining and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        remaining = [process for process in remaining if _runs(process)]
    return not remaining


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _status(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status()
    return ""


def _environment(pid: int) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).environ()
    return {}


def _flags(pid: int) -> int | None:
    """The kernel's flags of a process (PF_*). psutil does not show them."""
    with contextlib.suppress(OSError):
        # The name in brackets may hold blanks and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[_FLAGS_FIELD])
    return None
