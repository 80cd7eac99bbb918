"""Engines over two nodes: their servers start, end and start again together.

Both nodes are in this process. A tiny server is each server of an engine.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from megatron_rl.config.schema import EngineSettings, RecoverySettings
from megatron_rl.engines.node.meeting import EngineStart, Meeting, ServerReport, StartState
from megatron_rl.engines.node.node_board import NodeBoard
from megatron_rl.engines.node.node_processes import NodeProcesses
from megatron_rl.engines.node.node_reports import EngineReport, NodeOrders, ProcessState
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import create_keys
from sglang_bridge.server.process_table import is_alive, process_tree
from sglang_bridge.settings import ServerPlace
from tests.support.tiny_servers import (
    SERVER,
    only_supervisor,
    run_instead_of_sglang,
    server_pid,
    supervisors,
)

pytestmark = pytest.mark.slow

NO_ORDERS = NodeOrders()
# The delays before restarts pass faster
HASTE = 5
RANKS = [pytest.param(0, marks=pytest.mark.nightly), 1]
SECONDS = 30.0
# Tells where the servers meet
MEETING_SERVER = "import sys; print('meets', sys.argv[2], flush=True)" + SERVER
# The first start of the first server loses its port
UNLUCKY_SERVER = """
import sys, pathlib
mark = pathlib.Path(MARK)
if sys.argv[3] == "0" and not mark.exists():
    mark.touch()
    sys.exit("ERROR: [Errno 98] address already in use")
"""


class TwoNodes:
    """Two nodes that share an engine, as node 2 and node 3 of a run."""

    def __init__(self, directory: Path, recovery: RecoverySettings | None = None) -> None:
        self.code = MEETING_SERVER
        self.directory = directory
        store = dist.HashStore()
        self.boards = [NodeBoard(store) for _ in range(2)]
        self.nodes = [
            NodeProcesses(
                node=2 + rank,
                log_directory=directory,
                recovery=recovery,
                board=self.boards[rank],
                clock=lambda: HASTE * time.monotonic(),
            )
            for rank in range(2)
        ]

    @property
    def first(self) -> NodeProcesses:
        return self.nodes[0]

    def start(self) -> None:
        """Start the servers of both nodes."""
        keys = create_keys()
        for rank, node in enumerate(self.nodes):
            place = ServerPlace(
                model_path="/model", device="cpu", num_servers=2, server_rank=rank, node=2 + rank
            )
            node.start_engines(EngineSettings(tp=2, nodes_per_engine=2), [place], keys)

    def open(self) -> list[list[Engine]]:
        """Start the servers, and wait for them. Returns the engines that each node leads."""
        self.start()
        engines = [node.wait_healthy(20) for node in self.nodes]
        deadline = time.monotonic() + SECONDS
        while not self.is_complete:  # the tiny servers do not wait for one another
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return engines

    def pids(self, rank: int) -> list[int]:
        """The processes of one of the servers."""
        supervisor = only_supervisor(rank)  # the last word of a tiny server's command
        return [process.pid for process in process_tree(supervisor)]

    def kill(self, rank: int) -> None:
        """Kill one of the servers."""
        os.kill(server_pid(self.pids(rank)[0]), signal.SIGKILL)

    def meetings(self, rank: int) -> list[str]:
        """The places where the starts of a server met."""
        lines = (self.directory / f"engine-{2 + rank}-0.log").read_text().splitlines()
        return [line.removeprefix("meets ") for line in lines if line.startswith("meets ")]

    def maintain(self, orders: NodeOrders = NO_ORDERS) -> EngineReport:
        """Look after both nodes once, and return what the first one reports."""
        assert self.nodes[1].maintain(NO_ORDERS).engines == ()
        (report,) = self.first.maintain(orders).engines
        return report

    def maintain_until(
        self, condition: Callable[[EngineReport], bool], orders: NodeOrders = NO_ORDERS
    ) -> EngineReport:
        deadline = time.monotonic() + SECONDS
        while not condition(report := self.maintain(orders)):
            assert time.monotonic() < deadline, report
            time.sleep(0.05)
        return report

    def maintain_until_replaced(self, orders: NodeOrders = NO_ORDERS) -> EngineReport:
        """Wait until the engine runs in its second start."""
        return self.maintain_until(
            lambda r: (r.epoch, r.state) == (1, ProcessState.RUNNING) and self.is_complete, orders
        )

    @property
    def is_complete(self) -> bool:
        """True if both servers of the last start have said where they meet."""
        return len({*self.meetings(0)}) == len({*self.meetings(1)})

    def stop(self) -> None:
        for node in self.nodes:
            node.stop(3.0)


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TwoNodes]:
    two_nodes = TwoNodes(tmp_path)
    run_instead_of_sglang(monkeypatch, lambda: two_nodes.code)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield two_nodes
    two_nodes.stop()


def wait_until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_servers_of_both_nodes_meet_and_the_first_node_leads(two_nodes: TwoNodes) -> None:
    first_engines, further_engines = two_nodes.open()
    assert further_engines == []
    (engine,) = first_engines
    assert (engine.node, engine.tp) == (2, 2)
    (meeting,) = two_nodes.meetings(0)
    assert two_nodes.meetings(1) == [meeting]
    host, port = meeting.split(":")
    assert host == "127.0.0.1" and int(port) != int(engine.url.rpartition(":")[2])
    report = two_nodes.maintain()
    assert (report.epoch, report.engine, report.state) == (0, engine, ProcessState.RUNNING)


@pytest.mark.parametrize("rank", RANKS)
def test_a_server_that_ends_takes_the_whole_engine_to_its_next_start(
    two_nodes: TwoNodes, rank: int
) -> None:
    (first_engines, _) = two_nodes.open()
    old_pids = two_nodes.pids(0) + two_nodes.pids(1)
    two_nodes.kill(rank)
    report = two_nodes.maintain_until(lambda r: r.state is ProcessState.STARTING)
    assert report.epoch == 0 and "SIGKILL" in report.reason
    assert ("its server on node 3 ended" in report.reason) == (rank == 1)
    report = two_nodes.maintain_until_replaced()
    assert not any(map(is_alive, old_pids))
    assert [report.engine] == first_engines
    meetings = two_nodes.meetings(0)
    assert len({*meetings}) == 2 and two_nodes.meetings(1) == meetings
    for _ in range(5):
        assert two_nodes.maintain().epoch == 1
    end, start = two_nodes.first.take_events()
    assert end.endswith("; starting it again in 1 s, restart 1 of 6 this hour")
    assert start.startswith("engine 0 of node 2 answers again after ")


@pytest.mark.parametrize("rank", RANKS)
def test_servers_end_together_before_they_start_again(two_nodes: TwoNodes, rank: int) -> None:
    two_nodes.open()
    pids = two_nodes.pids(0) + two_nodes.pids(1)
    two_nodes.kill(rank)
    two_nodes.maintain_until(lambda r: r.state is ProcessState.STARTING)
    two_nodes.nodes[1].maintain(NO_ORDERS)
    wait_until_dead(pids)
    assert len(two_nodes.meetings(0)) == len(two_nodes.meetings(1)) == 1


def test_an_order_ends_the_servers_of_both_nodes(two_nodes: TwoNodes) -> None:
    two_nodes.open()
    old_pids = two_nodes.pids(0) + two_nodes.pids(1)
    orders = NodeOrders(restart_engines={0: 0}, reasons={"engine 0": "it answers rubbish"})
    report = two_nodes.maintain_until_replaced(orders)
    assert report.reason == "engine 0 of node 2 was ended: it answers rubbish"
    assert not any(map(is_alive, old_pids))


def test_a_further_server_that_is_stopped_ends_the_engine(two_nodes: TwoNodes) -> None:
    two_nodes.open()
    os.kill(server_pid(two_nodes.pids(1)[0]), signal.SIGSTOP)
    report = two_nodes.maintain_until_replaced()
    assert "SIGSTOP" in report.reason and "its server on node 3" in report.reason


@pytest.mark.parametrize("rank", RANKS)
def test_nothing_of_an_engine_is_left_once_it_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    two_nodes = TwoNodes(tmp_path, RecoverySettings(restarts_per_hour=0))
    run_instead_of_sglang(monkeypatch, lambda: two_nodes.code)
    two_nodes.open()
    pids = two_nodes.pids(0) + two_nodes.pids(1)
    two_nodes.kill(rank)
    report = two_nodes.maintain_until(lambda r: r.state is ProcessState.GIVEN_UP)
    assert "recovery.restarts_per_hour=0 allows no further start" in report.reason
    two_nodes.maintain()
    wait_until_dead(pids)
    two_nodes.stop()


def test_restarts_of_both_nodes_come_out_of_one_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_nodes = TwoNodes(tmp_path, RecoverySettings(restarts_per_hour=1))
    run_instead_of_sglang(monkeypatch, lambda: two_nodes.code)
    two_nodes.open()
    two_nodes.kill(1)
    two_nodes.maintain_until_replaced()
    two_nodes.kill(0)
    two_nodes.maintain_until(lambda r: r.state is ProcessState.GIVEN_UP)
    two_nodes.stop()


def test_a_start_that_loses_its_port_is_followed_to_the_next_meeting(
    two_nodes: TwoNodes, tmp_path: Path
) -> None:
    lucky_code = two_nodes.code
    two_nodes.code = UNLUCKY_SERVER.replace("MARK", repr(str(tmp_path / "mark"))) + lucky_code
    two_nodes.start()
    for node in two_nodes.nodes:
        node.wait_healthy(20)
    deadline = time.monotonic() + SECONDS
    while not two_nodes.meetings(0)[-1:] == two_nodes.meetings(1)[-1:] != []:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert two_nodes.maintain().epoch == 0
    assert (tmp_path / "mark").exists()


def test_the_end_of_a_run_is_no_end_of_an_engine(two_nodes: TwoNodes) -> None:
    """Nodes do not leave at the same time, and SGLang's other servers end with the first one."""
    two_nodes.open()
    two_nodes.nodes[1].stop(3.0)
    pids = two_nodes.pids(0)
    two_nodes.kill(0)
    wait_until_dead(pids[1:])
    for _ in range(10):
        (report,) = two_nodes.first.maintain(NO_ORDERS).engines
        assert (report.epoch, report.state) == (0, ProcessState.RUNNING)
        time.sleep(0.02)
    assert two_nodes.first.take_events() == []


def test_nothing_is_left_after_the_stop_of_both_nodes(two_nodes: TwoNodes) -> None:
    two_nodes.open()
    pids = two_nodes.pids(0) + two_nodes.pids(1)
    assert len(pids) >= 6
    two_nodes.stop()
    assert not any(map(is_alive, pids))
    two_nodes.maintain()
    assert supervisors() == []


def test_an_end_of_an_earlier_start_does_not_end_the_present_one(two_nodes: TwoNodes) -> None:
    """The report of a server may arrive when the engine was started again for another reason."""
    two_nodes.open()
    meeting = meeting_of(two_nodes.boards[1])
    meeting.report(1, ServerReport(number=0, reason="it was killed"))
    assert two_nodes.maintain().state is ProcessState.RUNNING
    meeting.report(1, ServerReport(number=1, reason="it was killed"))
    assert two_nodes.maintain().state is ProcessState.STARTING


def meeting_of(board: NodeBoard) -> Meeting:
    return Meeting(board, first_node=2, index=0, num_servers=2)


def test_a_further_server_that_fails_at_the_first_start_ends_the_run(two_nodes: TwoNodes) -> None:
    """Its reason and its log describe the failure."""
    two_nodes.start()
    report = ServerReport(number=1, reason="OSError: no model there", log_tail="Traceback")
    meeting_of(two_nodes.boards[1]).report(1, report)
    with pytest.raises(EngineError, match="on node 3 ended: OSError: no model") as error:
        two_nodes.first.wait_healthy(20)
    assert error.value.log_tail == "Traceback"


def test_an_engine_that_is_never_announced_is_an_error(two_nodes: TwoNodes) -> None:
    place = ServerPlace(model_path="/model", device="cpu", num_servers=2, server_rank=1, node=3)
    node = two_nodes.nodes[1]
    node.start_engines(EngineSettings(tp=2, nodes_per_engine=2), [place], create_keys())
    with pytest.raises(EngineError, match="node 2 leads was not announced within"):
        node.wait_healthy(0.1)


def test_a_start_that_has_ended_meanwhile_is_not_taken_part_in(two_nodes: TwoNodes) -> None:
    two_nodes.open()
    pids = two_nodes.pids(1)
    last_start = EngineStart(number=5, address="127.0.0.1:1", state=StartState.ENDED)
    meeting_of(two_nodes.boards[0]).announce(last_start)
    two_nodes.nodes[1].maintain(NO_ORDERS)
    wait_until_dead(pids)
    assert len(two_nodes.meetings(1)) == 1
