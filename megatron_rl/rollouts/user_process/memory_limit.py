"""The memory of a tree of processes, and the limit of a user-defined class."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import psutil

from sglang_bridge.server.process_table import descendants

GIGABYTE = 10**9
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SHARE_OF_MACHINE = 0.5
_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_PROPORTIONAL = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def limit_in_bytes(gigabytes: float | None) -> int:
    """Return a limit in bytes. None: half of the memory of the machine or its control group."""
    if gigabytes is not None:
        return int(gigabytes * GIGABYTE)
    limits = [psutil.virtual_memory().total]
    for file in _CGROUP_LIMITS:
        # There is no limit if the file is missing or says `max`.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(file.read_text()))
    return int(_SHARE_OF_MACHINE * min(limits))


def memory_over_limit(root: int, limit: int) -> int | None:
    """Return the bytes that the processes below `root` use if they are above the limit.

    Memory that several processes share counts once.
    """
    pids = descendants(root)
    # Reading the shares of shared memory takes long, so this sum, which is never smaller, decides
    # if it is worth it.
    if sum(map(_resident_bytes, pids)) <= limit:
        return None
    total = sum(map(_proportional_bytes, pids))
    return total if total > limit else None


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    return 0


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        sizes = _PROPORTIONAL.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())
        if sizes:
            return int(sizes[0]) * 1024
    return _resident_bytes(pid)
