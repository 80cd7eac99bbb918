"""A process that was stopped and is not continued is noticed; one that goes on is not."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron_rl.engines.frozen_processes import FrozenProcesses, ProcessStopped
from sglang_bridge.server.process_table import is_alive, is_stopped, kill, process_tree


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def parent() -> Iterator[subprocess.Popen[str]]:
    code = "import subprocess, sys\nc = subprocess.Popen(['sleep', '60'])\nprint(c.pid, flush=True)\nc.wait()\n"
    job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    yield job
    kill(process_tree(job.pid))
    job.communicate()


def child_of(parent: subprocess.Popen[str]) -> int:
    assert parent.stdout is not None
    return int(parent.stdout.readline())


def send(pid: int, number: signal.Signals) -> None:
    """Stop or continue a process and wait until the kernel shows it."""
    os.kill(pid, number)
    while is_stopped(pid) != (number == signal.SIGSTOP):
        pass


def test_a_stopped_process_anywhere_below_is_named_after_a_while(
    parent: subprocess.Popen[str],
) -> None:
    child, clock = child_of(parent), Clock()
    pulse = FrozenProcesses(5.0, clock=clock)
    send(child, signal.SIGSTOP)
    for clock.now in range(1, 6):
        pulse.look({"engine http://e": parent.pid})
    clock.now = 6
    with pytest.raises(
        ProcessStopped, match=rf"engine http://e was stopped \(SIGSTOP\).*5 s: process {child}"
    ):
        pulse.look({"engine http://e": parent.pid})


def test_a_process_that_is_continued_starts_anew_and_time_nobody_looked_does_not_count(
    parent: subprocess.Popen[str],
) -> None:
    child, clock = child_of(parent), Clock()
    pulse = FrozenProcesses(5.0, clock=clock)
    send(child, signal.SIGSTOP)
    clock.now = 1000.0  # the trainer itself was suspended: this counts two seconds
    pulse.look({"e": parent.pid})
    clock.now = 1002.0
    pulse.look({"e": parent.pid})
    send(child, signal.SIGCONT)
    pulse.look({"e": parent.pid})
    send(child, signal.SIGSTOP)
    for clock.now in (1004.0, 1006.0):
        pulse.look({"e": parent.pid})


def test_a_process_that_has_ended_is_nobody() -> None:
    assert not is_alive(2**22 + 1)
    FrozenProcesses(0.0).look({"gone": 2**22 + 1})
