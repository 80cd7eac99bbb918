"""Stopped processes are detected; processes that were continued are not."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from megatron_rl.engines.node.frozen_processes import FrozenProcesses, ProcessFrozen
from sglang_bridge.server.process_table import kill, process_tree

_PARENT = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""
_NO_PROCESS = 2**22 + 1


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    job = subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True)
    yield job
    kill(process_tree(job.pid))
    job.communicate()


def child_of(parent: subprocess.Popen[str]) -> int:
    assert parent.stdout is not None
    return int(parent.stdout.readline())


def send_signal(pid: int, number: signal.Signals, status: str) -> None:
    """Send a signal and wait for its effect."""
    os.kill(pid, number)
    while psutil.Process(pid).status() != status:
        pass


def test_a_stopped_descendant_is_an_error_after_the_limit(
    parent: subprocess.Popen[str],
) -> None:
    child = child_of(parent)
    clock = Clock()
    processes = FrozenProcesses(5.0, clock=clock)
    send_signal(child, signal.SIGSTOP, psutil.STATUS_STOPPED)
    for clock.now in range(1, 6):
        processes.check({"engine http://e": parent.pid})
    clock.now = 6
    with pytest.raises(
        ProcessFrozen, match=rf"engine http://e was stopped \(SIGSTOP\).*5 s: process {child}"
    ):
        processes.check({"engine http://e": parent.pid})


def test_time_without_checks_and_time_before_a_continue_do_not_count(
    parent: subprocess.Popen[str],
) -> None:
    child = child_of(parent)
    clock = Clock()
    processes = FrozenProcesses(5.0, clock=clock)
    roots = {"e": parent.pid}
    send_signal(child, signal.SIGSTOP, psutil.STATUS_STOPPED)
    # The trainer itself was suspended: this counts two seconds
    clock.now = 1000.0
    processes.check(roots)
    clock.now = 1002.0
    processes.check(roots)
    send_signal(child, signal.SIGCONT, psutil.STATUS_SLEEPING)
    processes.check(roots)
    send_signal(child, signal.SIGSTOP, psutil.STATUS_STOPPED)
    for clock.now in (1004.0, 1006.0):
        processes.check(roots)


@pytest.mark.parametrize(("generations", "is_error"), [(0, False), (1, True), (None, True)])
def test_so_many_generations_of_descendants_are_looked_at(
    parent: subprocess.Popen[str], generations: int | None, is_error: bool
) -> None:
    child = child_of(parent)
    clock = Clock()
    processes = FrozenProcesses(1.0, generations=generations, clock=clock)
    send_signal(child, signal.SIGSTOP, psutil.STATUS_STOPPED)
    clock.now = 2
    with pytest.raises(ProcessFrozen) if is_error else contextlib.nullcontext():
        processes.check({"e": parent.pid})


def test_a_process_that_has_ended_is_not_stopped() -> None:
    FrozenProcesses(0.0).check({"e": _NO_PROCESS})
