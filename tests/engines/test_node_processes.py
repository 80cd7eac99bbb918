"""The processes of a node are maintained, and end in time. A tiny server is the engine."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron_rl.config.schema import EngineSettings, RecoverySettings
from megatron_rl.engines.node import collector_process
from megatron_rl.engines.node.node_processes import NodeProcesses
from megatron_rl.engines.node.node_reports import NodeOrders, NodeReport, ProcessState
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineDied
from sglang_bridge.keys import create_keys
from sglang_bridge.server.process_table import descendants, is_alive, process_tree
from sglang_bridge.settings import ServerPlace
from tests.support.tiny_servers import (
    FAILING,
    SERVER,
    SILENT,
    memory_names,
    only_supervisor,
    run_instead_of_sglang,
    server_pid,
    supervisors,
)

pytestmark = pytest.mark.slow

NO_ORDERS = NodeOrders()
# The delays before restarts pass faster
HASTE = 5
# Starts an engine in the folder of its argument
TRAINER = """
import sys, time
from pathlib import Path
import pytest
from megatron_rl.config.schema import EngineSettings
from megatron_rl.engines.node.node_processes import NodeProcesses
from sglang_bridge.keys import create_keys
from sglang_bridge.settings import ServerPlace
from tests.support.tiny_servers import SERVER, run_instead_of_sglang

run_instead_of_sglang(pytest.MonkeyPatch(), lambda: SERVER)
processes = NodeProcesses(node=0, log_directory=Path(sys.argv[1]))
place = ServerPlace(model_path="/model", device="cpu")
processes.start_engines(EngineSettings(), [place], create_keys())
processes.wait_healthy(20)
print("healthy", flush=True)
time.sleep(60)
"""
ROOT = Path(__file__).parents[2]


class Node:
    """The processes of a node with `count` engines, and the code that they run."""

    def __init__(
        self,
        log_directory: Path,
        recovery: RecoverySettings | None = None,
        *,
        restarts_engines: bool = True,
    ) -> None:
        self.code = SERVER
        self.num_starts = 0  # of servers
        self.engines: list[Engine] = []
        self.log_directory = log_directory
        self.processes = NodeProcesses(
            node=0,
            log_directory=log_directory,
            recovery=recovery,
            restarts_engines=restarts_engines,
            clock=lambda: HASTE * time.monotonic(),
        )

    def open(self, count: int = 1) -> None:
        places = [ServerPlace(model_path="/model", device="cpu")] * count
        self.processes.start_engines(EngineSettings(), places, create_keys())
        self.engines = self.processes.wait_healthy(20)

    def next_code(self) -> str:
        """The code of a server that starts."""
        self.num_starts += 1
        return self.code

    def pids(self, index: int = 0) -> list[int]:
        """The supervisor of an engine, its server and what is below it."""
        port = self.engines[index].url.rpartition(":")[2]
        supervisor = only_supervisor(port, None, 0)
        return [process.pid for process in process_tree(supervisor)]

    def memory(self) -> list[str]:
        """The shared memory of engines that is left."""
        names: list[str] = []
        for log in self.log_directory.glob("engine-*.log"):
            names += memory_names(log)
        assert names
        return [name for name in names if name in os.listdir("/dev/shm")]

    def maintain_until(
        self, condition: Callable[[NodeReport], bool], orders: NodeOrders = NO_ORDERS
    ) -> NodeReport:
        deadline = time.monotonic() + 30
        while True:
            report = self.processes.maintain(orders)
            if condition(report):
                return report
            assert time.monotonic() < deadline, report
            time.sleep(0.05)


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    node = Node(tmp_path)
    run_instead_of_sglang(monkeypatch, node.next_code)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(
        collector_process,
        "build_argv",
        lambda hub, node, epoch: [sys.executable, "-c", SILENT, "collector", str(epoch)],
    )
    yield node
    node.processes.stop(3.0)


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "frozen_indices",
    [
        pytest.param((), id="none", marks=pytest.mark.nightly),
        pytest.param((0,), id="supervisor", marks=pytest.mark.nightly),
        pytest.param((1,), id="engine", marks=pytest.mark.nightly),
        pytest.param((0, 1, 2), id="all"),
    ],
)
def test_all_processes_end_even_when_some_are_frozen(
    node: Node, frozen_indices: tuple[int, ...]
) -> None:
    node.open()
    node.processes.start_collector(("127.0.0.1", 1), "key")
    pids = node.pids()
    collector = only_supervisor("collector", 0)
    assert len(pids) >= 3
    for index in frozen_indices:
        os.kill(pids[index], signal.SIGSTOP)
    start = time.monotonic()
    node.processes.stop(1.5)
    assert time.monotonic() - start < 20
    assert [pid for pid in [*pids, collector] if is_alive(pid)] == []
    assert node.memory() == []
    node.processes.stop(1.5)


def test_shared_memory_of_engines_is_removed(node: Node) -> None:
    """Python's resource tracker is killed with the engine, and SGLang's own files have none."""
    node.open()
    pids = node.pids()
    assert len(node.memory()) == 1
    os.kill(pids[0], signal.SIGKILL)
    wait_until_dead(pids[:2])
    node.processes.stop(3.0)
    assert not any(map(is_alive, pids))
    assert node.memory() == []


def test_engines_of_a_trainer_that_was_killed_end_with_their_shared_memory(node: Node) -> None:
    command = [sys.executable, "-c", TRAINER, str(node.log_directory)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == b"healthy\n"
        pids = descendants(trainer.pid)
        trainer.kill()
    assert len(pids) >= 3
    wait_until_dead(pids)
    assert node.memory() == []


def test_engines_run_in_their_first_epoch(node: Node) -> None:
    node.open(count=2)
    report = node.processes.maintain(NO_ORDERS)
    states = [(e.index, e.epoch, e.state, e.reason) for e in report.engines]
    assert states == [(index, 0, ProcessState.RUNNING, "") for index in (0, 1)]
    assert [e.engine for e in report.engines] == node.processes.wait_healthy(1.0)
    assert (report.node, report.collector) == (0, None)
    assert node.processes.take_events() == []


def test_an_engine_that_ended_is_started_again(node: Node) -> None:
    node.open(count=2)
    initial = node.processes.maintain(NO_ORDERS)
    pids = node.pids(1)
    os.kill(server_pid(pids[0]), signal.SIGKILL)
    report = node.maintain_until(lambda r: r.engines[1].state is ProcessState.STARTING)
    assert report.engines[1].epoch == 0 and not any(map(is_alive, pids))
    report = node.maintain_until(lambda r: r.engines[1].state is ProcessState.RUNNING)
    first, second = report.engines
    assert first == initial.engines[0]
    assert (second.epoch, second.engine) == (1, initial.engines[1].engine)
    assert "SIGKILL: from outside, or by the kernel for want of memory" in second.reason
    assert f"see {node.log_directory}/engine-0-1.log" in second.reason
    assert len(node.memory()) == 2


def test_lines_for_people_tell_of_an_end_and_a_start(node: Node) -> None:
    node.open(count=2)
    os.kill(server_pid(node.pids(1)[0]), signal.SIGKILL)
    node.maintain_until(lambda r: r.engines[1].epoch == 1)
    node.maintain_until(lambda r: r.engines[1].state is ProcessState.RUNNING)
    end, start = node.processes.take_events()
    assert end.startswith("engine 1 of node 0: engine http://127.0.0.1:")
    assert end.endswith("; starting it again in 1 s, restart 1 of 6 this hour")
    assert start.startswith("engine 1 of node 0 answers again after ")
    assert node.processes.take_events() == []


def test_an_order_ends_an_engine_once(node: Node) -> None:
    node.open()
    orders = NodeOrders(restart_engines={0: 0}, reasons={"engine 0": "it answers rubbish"})
    report = node.maintain_until(lambda r: r.engines[0].epoch == 1, orders)
    assert report.engines[0].reason == "engine 0 of node 0 was ended: it answers rubbish"
    node.maintain_until(lambda r: r.engines[0].state is ProcessState.RUNNING, orders)
    for _ in range(5):
        assert node.processes.maintain(orders).engines[0].epoch == 1
    assert len(node.processes.take_events()) == 2


def collector_runs(epoch: int) -> Callable[[NodeReport], bool]:
    """Tell if a report says that the collector runs in this epoch."""
    state = ProcessState.RUNNING
    return lambda r: (
        r.collector is not None
        and (r.collector.epoch, r.collector.state)
        == (
            epoch,
            state,
        )
    )


def test_a_collector_that_ended_is_started_again(node: Node) -> None:
    node.open()
    node.processes.start_collector(("127.0.0.1", 1), "key")
    assert collector_runs(0)(node.processes.maintain(NO_ORDERS))
    collector = only_supervisor("collector", 0)
    os.kill(collector, signal.SIGKILL)
    node.maintain_until(collector_runs(1))
    orders = NodeOrders(restart_collector=1, reasons={"collector": "it does not answer"})
    report = node.maintain_until(collector_runs(2), orders)
    assert report.collector is not None
    assert report.collector.reason == "the collector of node 0 was ended: it does not answer"
    assert report.engines[0].epoch == 0
    events = node.processes.take_events()
    assert events[0].startswith("the collector of node 0 ended (SIGKILL")
    assert events[1].startswith("the collector of node 0 runs again after ")
    assert len(events) == 4 and len(supervisors("collector", 2)) == 1


@pytest.fixture
def node_without_restarts(node: Node, tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, RecoverySettings(restarts_per_hour=0))
    yield node
    node.processes.stop(3.0)


def test_engines_are_given_up_without_restarts(node_without_restarts: Node) -> None:
    node = node_without_restarts
    node.open()
    os.kill(server_pid(node.pids()[0]), signal.SIGKILL)
    report = node.maintain_until(lambda r: r.engines[0].state is ProcessState.GIVEN_UP)
    assert "recovery.restarts_per_hour=0 allows no further start" in report.engines[0].reason
    assert "it is given up" in node.processes.take_events()[0]


def test_a_colocated_engine_that_ends_is_given_up(node: Node, tmp_path: Path) -> None:
    """While it starts, it would take memory that the trainer uses."""
    other_node = Node(tmp_path, restarts_engines=False)
    other_node.open()
    os.kill(server_pid(other_node.pids()[0]), signal.SIGKILL)
    report = other_node.maintain_until(lambda r: r.engines[0].state is ProcessState.GIVEN_UP)
    assert "engine.colocated=true allows no further start" in report.engines[0].reason
    other_node.processes.stop(3.0)


def test_an_engine_that_was_never_healthy_ends_the_run(node: Node) -> None:
    """An incorrect argument would be incorrect in the next start too."""
    node.code = FAILING
    with pytest.raises(EngineDied, match="OSError: no model there"):
        node.open()
    report = node.processes.maintain(NO_ORDERS)
    assert report.engines == () and node.num_starts == 1


@pytest.mark.parametrize(
    "delay",
    [
        pytest.param(0.0, marks=pytest.mark.nightly),
        0.05,
        pytest.param(0.3, marks=pytest.mark.nightly),
    ],
)
def test_a_stop_wins_over_a_restart(
    node: Node, monkeypatch: pytest.MonkeyPatch, delay: float
) -> None:
    """The stop comes while the thread that maintains ends the old tree or starts the new one."""
    node.open()
    pids = node.pids()
    os.kill(server_pid(pids[0]), signal.SIGKILL)
    node.maintain_until(lambda r: r.engines[0].state is ProcessState.STARTING)
    node.processes.take_events()
    time.sleep(1.0 / HASTE)
    thread = threading.Thread(target=node.processes.maintain, args=(NO_ORDERS,))
    thread.start()
    time.sleep(delay)
    node.processes.stop(3.0)
    num_starts = node.num_starts
    thread.join()
    for _ in range(3):
        node.processes.maintain(NO_ORDERS)
    assert node.num_starts == num_starts
    assert supervisors() == [] and not any(map(is_alive, pids))
    assert node.memory() == []
    assert node.processes.take_events() == []


def test_a_collector_is_not_started_after_a_stop(node: Node) -> None:
    node.open()
    node.processes.stop(3.0)
    node.processes.start_collector(("127.0.0.1", 1), "key")
    assert node.processes.maintain(NO_ORDERS).collector is None and supervisors() == []


def test_a_collector_may_have_children_that_are_stopped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user-defined class starts such children. If the collector itself stops, it is ended."""
    code = "import subprocess; subprocess.run(['sleep', '60'])"
    monkeypatch.setattr(
        collector_process,
        "build_argv",
        lambda hub, node, epoch: [sys.executable, "-c", code, str(epoch)],
    )
    node.processes.start_collector(("127.0.0.1", 1), "key")
    collector = only_supervisor(0)
    while len(tree := process_tree(collector)) < 3 or tree[2].name() != "sleep":
        time.sleep(0.02)
    _, own, child = tree
    child.suspend()
    deadline = time.monotonic() + 3 * 7.0 / HASTE
    while time.monotonic() < deadline:
        report = node.processes.maintain(NO_ORDERS)
        assert report.collector is not None and report.collector.epoch == 0
        assert report.collector.state is ProcessState.RUNNING
        time.sleep(0.05)
    own.suspend()
    node.maintain_until(lambda report: report.collector is not None and report.collector.epoch == 1)
