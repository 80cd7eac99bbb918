"""Run a command and end its whole process tree when the process that holds the lifeline is gone.

python -m sglang_bridge.server.supervise --lifeline FD [--grace-seconds S] -- COMMAND...
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sglang_bridge.server.shared_memory import mapped_shared_memory, remove_shared_memory

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHECK_SECONDS = 0.5
_TRACKER_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    stop_requested = _flag_on_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # Descendants whose parent dies become children of this process, so that none can escape the
    # clean-up.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    child = subprocess.Popen(options.command, start_new_session=True, preexec_fn=_die_with_parent)
    while child.poll() is None:
        if (
            stop_requested()
            or os.getppid() != parent
            or _is_broken(options.lifeline, _CHECK_SECONDS)
        ):
            break
    code = end_tree(child, options.grace_seconds)
    return 128 - code if code < 0 else code


def end_tree(child: subprocess.Popen[bytes], grace_seconds: float) -> int:
    """SIGTERM to the child's process group, SIGKILL after the grace to every descendant left.
    Returns its code.

    Trackers of multiprocessing's resources come last: they end by themselves when nobody is left
    who uses them, and remove the named semaphores that were left. A killed one removes none.
    """
    shared_memory = mapped_shared_memory(descendants(os.getpid()))
    _signal_group(child.pid, signal.SIGTERM)
    _wait(child, grace_seconds)
    _kill_all(child, but=_is_tracker)
    _wait(child, _TRACKER_SECONDS)
    _kill_all(child)
    remove_shared_memory(shared_memory)
    return child.wait()


def _wait(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Until the whole tree has ended, but no longer than that."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (child.poll() is None or descendants(os.getpid())):
        _reap_orphans(child)
        time.sleep(0.05)


def _kill_all(
    child: subprocess.Popen[bytes], but: Callable[[int], bool] = lambda pid: False
) -> None:
    """SIGKILL until no descendant is left; but: of those that may stay."""
    while left := [pid for pid in descendants(os.getpid()) if not but(pid)]:
        for pid in left:
            _kill(pid)
        child.poll()
        _reap_orphans(child)
        time.sleep(0.02)


def _is_tracker(pid: int) -> bool:
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Every living or unreaped process below `pid`, parents first."""
    found = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids = [int(field) for field in children.read_text().split()]
        except OSError:
            continue
        for child in pids:
            found += [child, *descendants(child)]
    return found


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang_bridge.server.supervise", description=__doc__)
    parser.add_argument("--lifeline", type=int, required=True, help="read end of the pipe to watch")
    parser.add_argument(
        "--grace-seconds", type=float, default=5.0, help="between SIGTERM and SIGKILL"
    )
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _flag_on_signals(*signals: signal.Signals) -> Callable[[], bool]:
    received: list[int] = []
    for number in signals:
        signal.signal(number, lambda number, frame: received.append(number))
    return lambda: bool(received)


def _is_broken(lifeline: int, timeout: float) -> bool:
    """Wait up to `timeout` seconds; nothing is ever written to a lifeline, so readable means
    end-of-file.
    """
    readable, _, _ = select.select([lifeline], [], [], timeout)
    return bool(readable)


def _die_with_parent() -> None:
    """In the child, before exec: the kernel kills it should this supervisor be killed."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, int(value), 0, 0, 0)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _reap_orphans(child: subprocess.Popen[bytes]) -> None:
    """Collect adopted descendants that have ended; the child itself is left to its Popen object."""
    for pid in descendants(os.getpid()):
        if pid != child.pid:
            with contextlib.suppress(ChildProcessError):  # not adopted (yet)
                os.waitpid(pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
