"""What a node runs beside its ranks ends in time, whatever state it is in.

A supervised `sleep` stands in.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.engines.frozen_processes import FrozenProcesses, ProcessStopped
from megatron_rl.engines.node_processes import NodeProcesses
from sglang_bridge.engine import Engine
from sglang_bridge.server.lifeline import Lifeline, start_supervised
from sglang_bridge.server.process_table import is_alive, process_tree

_SLEEP = "import subprocess; subprocess.Popen(['sleep', '60']).wait()"


class Sleeper:
    """Looks like an engine to the services."""

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
        deadline = time.monotonic() + 20
        while (
            len(process_tree(self.pid)) < 3 and time.monotonic() < deadline
        ):  # supervisor, python, sleep
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


@pytest.fixture
def services(tmp_path: Path) -> NodeProcesses:
    services = NodeProcesses(node=0, log_directory=tmp_path)
    services._engines.append(Sleeper(services._lifeline))  # type: ignore[arg-type]
    return services


@pytest.mark.parametrize(
    "stopped", [(), (0,), (2,), (0, 1, 2)], ids=["none", "supervisor", "engine", "all"]
)
def test_nothing_is_left_whatever_was_stopped(
    services: NodeProcesses, stopped: tuple[int, ...]
) -> None:
    everything = [process.pid for process in process_tree(services._engines[0].pid)]
    assert len(everything) == 3
    for index in stopped:
        os.kill(everything[index], signal.SIGSTOP)
    start = time.monotonic()
    services.stop(1.5)
    assert time.monotonic() - start < 6
    deadline = time.monotonic() + 2
    while any(is_alive(pid) for pid in everything) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in everything if is_alive(pid)] == []
    services.stop(1.5)


def test_a_stopped_engine_ends_the_run_after_a_while(services: NodeProcesses) -> None:
    services._pulse = FrozenProcesses(0.3)
    services.check()
    os.kill(process_tree(services._engines[0].pid)[-1].pid, signal.SIGSTOP)
    with pytest.raises(ProcessStopped, match="engine http://127"):
        for _ in range(100):
            services.check()
            time.sleep(0.05)
    services.stop(1.0)


@pytest.mark.parametrize("death", ["ended", "supervisor killed", "trainer killed"])
def test_shared_memory_of_engines_is_removed_whoever_dies(tmp_path: Path, death: str) -> None:
    """Python's resource tracker, which would do it, is killed with them; SGLang's own files nobody
    tracks.
    """
    code = (
        "import multiprocessing, signal, time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "lock, memory = multiprocessing.get_context('spawn').Lock(), SharedMemory(create=True, size=4096)\n"
        "print(memory.name, flush=True)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60)\n"
    )
    services, log = NodeProcesses(node=0, log_directory=tmp_path), tmp_path / "log"
    services._engines.append(engine := Sleeper(services._lifeline, code, log))  # type: ignore[arg-type]
    while len(log.read_text()) < 5:
        time.sleep(0.05)
    name = log.read_text().strip()
    services.wait_healthy(10)
    assert name in os.listdir("/dev/shm")
    if death == "trainer killed":
        services._lifeline.close()
        engine.process.wait(10)
    else:
        if death == "supervisor killed":
            engine.process.kill()
            engine.process.wait()
        services.stop(3.0)
    assert name not in os.listdir("/dev/shm")
