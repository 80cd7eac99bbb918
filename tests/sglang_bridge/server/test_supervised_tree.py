"""A helper that is started, ended and closed by several threads."""

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.process_table import is_alive, process_tree, wait_for_end
from sglang_bridge.server.supervised_tree import SupervisedTree


def sleep(seconds: float = 0.0) -> subprocess.Popen[bytes]:
    """Start a process, which takes a moment."""
    process = subprocess.Popen(["sleep", "60"])
    time.sleep(seconds)
    return process


def test_a_close_wins_over_starts() -> None:
    """One thread starts all the time, and another one closes."""
    tree = SupervisedTree()
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        processes.append(sleep(0.05))
        return processes[-1]

    def start_repeatedly() -> None:
        while tree.start(start):
            tree.end(1.0)

    thread = threading.Thread(target=start_repeatedly)
    thread.start()
    while len(processes) < 3:
        time.sleep(0.02)
    tree.close(1.0)
    count = len(processes)
    assert count > 1
    assert [process.pid for process in processes if is_alive(process.pid)] == []
    thread.join()
    assert len(processes) == count


def test_a_close_ends_a_start_that_it_interrupts() -> None:
    tree = SupervisedTree()
    is_starting = threading.Event()

    def start() -> subprocess.Popen[bytes]:
        is_starting.set()
        return sleep(0.3)

    thread = threading.Thread(target=tree.start, args=(start,))
    thread.start()
    is_starting.wait()
    tree.close(1.0)
    assert tree.exit_code is not None
    assert not tree.start(sleep)
    thread.join()


def test_a_helper_that_was_never_started_is_closed() -> None:
    tree = SupervisedTree()
    tree.request_end()
    tree.close(1.0)
    assert tree.exit_code is None
    with pytest.raises(RuntimeError, match="never started"):
        assert tree.pid


def test_a_supervisor_that_does_not_end_is_killed() -> None:
    tree = SupervisedTree()
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-uc", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    tree.start(lambda: process)
    tree.end(0.2)
    assert process.returncode == -9
    process.stdout.close()


def test_request_end_ends_the_whole_tree_without_waiting() -> None:
    code = "import subprocess; subprocess.Popen(['sleep', '60']).wait()"
    with contextlib.closing(Lifeline()) as lifeline:
        tree = SupervisedTree()
        tree.start(
            lambda: start_supervised(
                [sys.executable, "-c", code],
                lifeline=lifeline,
                environment=os.environ,
                grace_seconds=5.0,
            )
        )
        while len(process_tree(tree.pid)) < 3:
            time.sleep(0.02)
        members = process_tree(tree.pid)
        start = time.monotonic()
        tree.request_end()
        assert time.monotonic() - start < 2.0
        assert wait_for_end(members, 10) and tree.exit_code is not None
        tree.close(1.0)


def test_a_process_that_got_the_id_of_a_dead_supervisor_is_left_alone() -> None:
    other = sleep()
    ended_process = subprocess.Popen(["true"])
    ended_process.wait()
    ended_process.pid = other.pid  # as if the kernel had given the id away
    tree = SupervisedTree()
    tree.start(lambda: ended_process)
    tree.request_end()
    tree.close(0.2)
    time.sleep(0.1)
    assert other.poll() is None
    other.kill()
    other.wait()
