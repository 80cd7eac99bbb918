"""The processes of a node end in time, whatever their state. A supervised `sleep` is the engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.engines.frozen_processes import FrozenProcesses, ProcessFrozen
from megatron_rl.engines.node_processes import CollectorDied, NodeProcesses
from sglang_bridge.engine import Engine
from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.process_table import is_alive, process_tree

_SLEEP = "import subprocess; subprocess.Popen(['sleep', '60']).wait()"
# Holds shared memory, as SGLang does, and ignores SIGTERM
_HOLD_SHARED_MEMORY = """
import multiprocessing, signal, time
from multiprocessing.shared_memory import SharedMemory
lock = multiprocessing.get_context("spawn").Lock()
memory = SharedMemory(create=True, size=4096)
print(memory.name, flush=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""


class FakeEngine:
    """Has the methods of a `ManagedEngine`, and runs other code."""

    url = "http://127.0.0.1:1"
    engine = Engine(url=url)

    def __init__(self, lifeline: Lifeline, code: str = _SLEEP, log: Path | None = None) -> None:
        with (log or Path(os.devnull)).open("wb") as out:
            self.process = start_supervised(
                [sys.executable, "-c", code],
                lifeline=lifeline,
                environment=dict(os.environ),
                log=out,
                grace_seconds=0.3,
            )
        self.pid = self.process.pid
        # The supervisor, python and its child
        deadline = time.monotonic() + 20
        while len(process_tree(self.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.05)

    def poll_healthy(self) -> bool:
        return True

    def check_alive(self) -> None:
        assert self.process.poll() is None

    def stop(self, *, timeout: float) -> None:
        self.process.terminate()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def add_engine(processes: NodeProcesses, code: str = _SLEEP, log: Path | None = None) -> FakeEngine:
    engine = FakeEngine(processes._lifeline, code, log)
    processes._engines.append(engine)  # type: ignore[arg-type]
    return engine


@pytest.fixture
def processes(tmp_path: Path) -> NodeProcesses:
    return NodeProcesses(node=0, log_directory=tmp_path)


@pytest.mark.parametrize(
    "frozen_indices", [(), (0,), (2,), (0, 1, 2)], ids=["none", "supervisor", "engine", "all"]
)
def test_all_processes_end_even_when_some_are_frozen(
    processes: NodeProcesses, frozen_indices: tuple[int, ...]
) -> None:
    engine = add_engine(processes)
    pids = [process.pid for process in process_tree(engine.pid)]
    assert len(pids) == 3
    for index in frozen_indices:
        os.kill(pids[index], signal.SIGSTOP)
    start = time.monotonic()
    processes.stop(1.5)
    assert time.monotonic() - start < 6
    deadline = time.monotonic() + 2
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in pids if is_alive(pid)] == []
    processes.stop(1.5)


def test_a_frozen_engine_is_an_error_after_a_while(processes: NodeProcesses) -> None:
    engine = add_engine(processes)
    processes._frozen_processes = FrozenProcesses(0.3)
    processes.check()
    os.kill(process_tree(engine.pid)[-1].pid, signal.SIGSTOP)
    with pytest.raises(ProcessFrozen, match="engine http://127"):
        for _ in range(100):
            processes.check()
            time.sleep(0.05)
    processes.stop(1.0)


@pytest.mark.parametrize("log", ["", "a scorer failed\n"])
def test_a_collector_that_ended_names_its_log(
    processes: NodeProcesses, tmp_path: Path, log: str
) -> None:
    (tmp_path / "collector-0.log").write_text(log)
    processes._collector = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    processes._collector.wait()
    with pytest.raises(CollectorDied) as error_info:
        processes.check()
    assert error_info.value.log_tail == log.strip()
    assert str(error_info.value) == (
        f"the collector of node 0 ended (exit code 3); see {tmp_path}/collector-0.log"
    )
    processes.stop(1.0)


@pytest.mark.parametrize("death", ["stop", "supervisor killed", "trainer killed"])
def test_shared_memory_of_engines_is_removed(
    processes: NodeProcesses, tmp_path: Path, death: str
) -> None:
    """Python's resource tracker is killed with the engine, and SGLang's own files have none."""
    log = tmp_path / "log"
    engine = add_engine(processes, _HOLD_SHARED_MEMORY, log)
    while len(log.read_text()) < 5:
        time.sleep(0.05)
    name = log.read_text().strip()
    processes.wait_healthy(10)
    assert name in os.listdir("/dev/shm")
    if death == "trainer killed":
        processes._lifeline.close()
        engine.process.wait(10)
    else:
        if death == "supervisor killed":
            engine.process.kill()
            engine.process.wait()
        processes.stop(3.0)
    assert name not in os.listdir("/dev/shm")
