"""Run a command and end its whole process tree when the process that holds the lifeline is gone.

python -m sglang_bridge.server.supervise --lifeline FD [--grace-seconds S] [--descriptor FD ...] --
COMMAND...
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from sglang_bridge.server.process_table import command_line, descendants
from sglang_bridge.server.shared_memory import mapped_shared_memory, remove_shared_memory

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CHECK_SECONDS = 0.5
_TRACKER_SECONDS = 5.0


def main(arguments: list[str]) -> int:
    """Supervise the command of these arguments and return its exit code."""
    options = _parse(arguments)
    is_stop_requested = _watch_signals(signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    # Descendants whose parent dies become children of this process, so that none can escape the
    # clean-up.
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent = os.getppid()
    with _environment(options.scratch) as environment:
        child = subprocess.Popen(
            options.command,
            env=environment,
            start_new_session=True,
            preexec_fn=_die_with_parent,
            pass_fds=options.descriptor,
        )
        # Whoever holds the other ends sees when the command closes its own.
        for descriptor in options.descriptor:
            os.close(descriptor)
        _wait_for_the_end(child, parent, options.lifeline, is_stop_requested)
        code = end_tree(child, options.grace_seconds)
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _environment(scratch: str | None) -> Iterator[dict[str, str]]:
    """The command's environment.

    scratch: VARIABLE=PATH of a directory that is created now and removed later, if any.
    """
    if scratch is None:
        yield dict(os.environ)
        return
    variable, _, path = scratch.partition("=")
    os.mkdir(path, mode=0o700)
    try:
        yield {**os.environ, variable: path}
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _wait_for_the_end(
    child: subprocess.Popen[bytes],
    parent: int,
    lifeline: int,
    is_stop_requested: Callable[[], bool],
) -> None:
    """Wait until the child ends, or its tree has to."""
    while child.poll() is None:
        if is_stop_requested() or os.getppid() != parent:
            break
        if _is_broken(lifeline, _CHECK_SECONDS):
            break


def end_tree(child: subprocess.Popen[bytes], grace_seconds: float) -> int:
    """End the child and everything below it, and return the child's exit code.

    The child's process group gets SIGTERM. After the grace, every remaining descendant gets
    SIGKILL. Resource trackers of Python's multiprocessing come last. A tracker ends by itself once
    no process uses it, and then removes the named semaphores that are left. A killed tracker
    removes none.
    """
    shared_memory = mapped_shared_memory(descendants(os.getpid()))
    _signal_group(child.pid, signal.SIGTERM)
    _wait_for_tree(child, grace_seconds)
    _kill_descendants(child, spare_trackers=True)
    _wait_for_tree(child, _TRACKER_SECONDS)
    _kill_descendants(child)
    remove_shared_memory(shared_memory)
    return child.wait()


def _wait_for_tree(child: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait until the whole tree has ended, at most `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (child.poll() is None or descendants(os.getpid())):
        _reap_orphans(child)
        time.sleep(0.05)


def _kill_descendants(child: subprocess.Popen[bytes], *, spare_trackers: bool = False) -> None:
    """Send SIGKILL until no descendant is left, except trackers if they are spared."""
    while True:
        pids = descendants(os.getpid())
        if spare_trackers:
            pids = [pid for pid in pids if not _is_tracker(pid)]
        if not pids:
            return
        for pid in pids:
            _kill(pid)
        child.poll()
        _reap_orphans(child)
        time.sleep(0.02)


def _is_tracker(pid: int) -> bool:
    return any("multiprocessing.resource_tracker" in argument for argument in command_line(pid))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang_bridge.server.supervise", description=__doc__)
    parser.add_argument("--lifeline", type=int, required=True, help="read end of the pipe to watch")
    parser.add_argument(
        "--grace-seconds", type=float, default=5.0, help="between SIGTERM and SIGKILL"
    )
    parser.add_argument(
        "--scratch",
        metavar="VARIABLE=PATH",
        help="a directory for the command, which the variable names; removed at the end",
    )
    parser.add_argument(
        "--descriptor", type=int, action="append", default=[], help="open one for the command"
    )
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _watch_signals(*signals: signal.Signals) -> Callable[[], bool]:
    """Handle these signals; the returned function tells if one has arrived."""
    arrivals: list[int] = []
    for number in signals:
        signal.signal(number, lambda number, frame: arrivals.append(number))
    return lambda: bool(arrivals)


def _is_broken(lifeline: int, timeout: float) -> bool:
    """Wait up to `timeout` seconds for the lifeline to break.

    Nothing is ever written to a lifeline, so readable means end-of-file.
    """
    readable, _, _ = select.select([lifeline], [], [], timeout)
    return bool(readable)


def _die_with_parent() -> None:
    """Ask the kernel, in the child before exec, to kill it when this supervisor is killed."""
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
            # A descendant that this process has not adopted yet belongs to another parent.
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
