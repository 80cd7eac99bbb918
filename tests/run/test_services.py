"""What a node runs beside its ranks ends in time, whatever state it is in. A supervised `sleep` stands in."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.run.process_table import lives, tree
from megatron_rl.run.pulse import ProcessStopped, Pulse
from megatron_rl.run.services import NodeServices
from sglang_bridge.lifeline import Lifeline, start_supervised


class Sleeper:
    """Looks like an engine to the services."""

    url = "http://127.0.0.1:1"

    def __init__(self, lifeline: Lifeline) -> None:
        code = "import subprocess; subprocess.Popen(['sleep', '60']).wait()"
        self.process = start_supervised(
            [sys.executable, "-c", code], lifeline=lifeline, environment=dict(os.environ), grace_seconds=0.3
        )
        self.pid = self.process.pid
        deadline = time.monotonic() + 20
        while len(tree(self.pid)) < 3 and time.monotonic() < deadline:  # supervisor, python, sleep
            time.sleep(0.05)

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
def services(tmp_path: Path) -> NodeServices:
    services = NodeServices(node=0, log_directory=tmp_path)
    services._engines.append(Sleeper(services._lifeline))  # type: ignore[arg-type]
    return services


@pytest.mark.parametrize("stopped", [(), (0,), (2,), (0, 1, 2)], ids=["none", "supervisor", "engine", "all"])
def test_nothing_is_left_whatever_was_stopped(services: NodeServices, stopped: tuple[int, ...]) -> None:
    everything = [process.pid for process in tree(services._engines[0].pid)]
    assert len(everything) == 3
    for index in stopped:
        os.kill(everything[index], signal.SIGSTOP)
    start = time.monotonic()
    services.stop(1.5)
    assert time.monotonic() - start < 6
    deadline = time.monotonic() + 2
    while any(lives(pid) for pid in everything) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in everything if lives(pid)] == []
    services.stop(1.5)


def test_a_stopped_engine_ends_the_run_after_a_while(services: NodeServices) -> None:
    services._pulse = Pulse(0.3)
    services.check()
    os.kill(tree(services._engines[0].pid)[-1].pid, signal.SIGSTOP)
    with pytest.raises(ProcessStopped, match="engine http://127"):
        for _ in range(100):
            services.check()
            time.sleep(0.05)
    services.stop(1.0)


def test_shared_memory_of_an_engine_that_is_killed_is_removed(tmp_path: Path) -> None:
    """Python's resource tracker does it, if it is given the time: a supervisor kills it last."""
    code = (
        "import multiprocessing, signal, sys, time\nfrom multiprocessing.shared_memory import SharedMemory\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "lock, memory = multiprocessing.get_context('spawn').Lock(), SharedMemory(create=True, size=4096)\n"
        "print(memory.name, flush=True)\ntime.sleep(60)\n"
    )
    before = set(os.listdir("/dev/shm"))
    lifeline, log = Lifeline(), tmp_path / "log"
    with log.open("wb") as out:
        process = start_supervised(
            [sys.executable, "-c", code], lifeline=lifeline, environment=dict(os.environ), log=out, grace_seconds=0.2
        )
    while not (name := log.read_text().strip()):
        time.sleep(0.05)
    mine = set(os.listdir("/dev/shm")) - before
    assert name in mine
    process.terminate()
    process.wait(10)
    lifeline.close()
    assert name not in os.listdir("/dev/shm")
