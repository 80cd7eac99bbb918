"""The thread that looks after the processes of a node, with scripted processes."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from megatron_rl.engines.node.node_board import NodeBoard, NodeBoardLost
from megatron_rl.engines.node.node_keeper import NodeKeeper
from megatron_rl.engines.node.node_reports import (
    CollectorReport,
    NodeOrders,
    NodeReport,
    ProcessState,
)


class ScriptedProcesses:
    """Has the methods of `NodeProcesses` that the thread calls."""

    node = 3

    def __init__(self) -> None:
        self.epoch = 0
        self.orders: list[NodeOrders] = []
        self.events: list[str] = []
        self.error: Exception | None = None
        self.threads: set[threading.Thread] = set()
        self.pause_seconds = 0.0

    def maintain(self, orders: NodeOrders) -> NodeReport:
        if self.error is not None:
            raise self.error
        self.threads.add(threading.current_thread())
        self.orders.append(orders)
        time.sleep(self.pause_seconds)
        collector = CollectorReport(epoch=self.epoch, state=ProcessState.RUNNING)
        return NodeReport(node=self.node, collector=collector)

    def take_events(self) -> list[str]:
        return [self.events.pop(0) for _ in range(len(self.events))]


class CountingBoard(NodeBoard):
    """Counts publications."""

    count = 0

    def publish(self, report: NodeReport) -> None:
        self.count += 1
        super().publish(report)


class Scene:
    def __init__(self) -> None:
        self.processes = ScriptedProcesses()
        self.board = CountingBoard(dist.HashStore())
        self.log: list[str] = []
        self.keeper: NodeKeeper | None = None

    def open(
        self,
        loss_seconds: float = 60.0,
        log: Callable[[str], None] | None = None,
        publish_seconds: float = 60.0,
    ) -> NodeKeeper:
        self.keeper = NodeKeeper(
            self.processes,  # type: ignore[arg-type]
            self.board,
            log=log or self.log.append,
            poll_seconds=0.01,
            publish_seconds=publish_seconds,
            loss_seconds=loss_seconds,
        )
        return self.keeper


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    if scene.keeper is not None:
        scene.keeper.close()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def epochs(scene: Scene) -> list[int]:
    reports = scene.board.read_reports([3])
    return [report.collector.epoch for report in reports if report.collector is not None]


def test_a_report_that_changed_is_published(scene: Scene) -> None:
    scene.open(publish_seconds=60.0)
    wait_until(lambda: epochs(scene) == [0])
    scene.processes.epoch = 1
    wait_until(lambda: epochs(scene) == [1])
    turns = len(scene.processes.orders)
    wait_until(lambda: len(scene.processes.orders) > turns + 5)
    assert scene.board.count == 2


def test_a_report_is_published_again_after_a_while(scene: Scene) -> None:
    scene.open(publish_seconds=0.05)
    wait_until(lambda: scene.board.count >= 4)
    assert len(scene.processes.orders) > scene.board.count


def test_orders_reach_the_processes_of_this_node(scene: Scene) -> None:
    orders = NodeOrders(restart_engines={0: 2})
    scene.open()
    wait_until(lambda: scene.processes.orders)
    scene.board.order(2, NodeOrders(restart_collector=5))
    scene.board.order(3, orders)
    wait_until(lambda: scene.processes.orders[-1] == orders)
    assert scene.processes.orders[0] == NodeOrders()
    assert NodeOrders(restart_collector=5) not in scene.processes.orders


def test_events_are_logged_once(scene: Scene) -> None:
    scene.processes.events = ["one", "two"]
    scene.open()
    wait_until(lambda: len(scene.processes.orders) > 3)
    assert scene.log == ["one", "two"]


def test_the_last_events_are_in_the_report(scene: Scene) -> None:
    """Rank 0 prints events of other nodes, because only its node has somewhere to print them."""
    scene.processes.events = ["one"]
    scene.open()
    wait_until(lambda: scene.board.read_reports([3])[:1])
    assert scene.board.read_reports([3])[0].events == ("one",)
    scene.processes.events += [str(number) for number in range(30)]
    wait_until(lambda: scene.board.read_reports([3])[0].num_events == 31)
    events = scene.board.read_reports([3])[0].events
    assert events == tuple(str(number) for number in range(10, 30))


def test_an_error_of_the_thread_reaches_the_check(scene: Scene) -> None:
    keeper = scene.open()
    wait_until(lambda: scene.processes.orders)
    keeper.check()
    scene.processes.error = ZeroDivisionError("an error of ours")
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: keeper.check())


def test_a_log_that_cannot_be_written_reaches_the_check(scene: Scene) -> None:
    def fail(text: str) -> None:
        raise OSError(28, "No space left on device")

    scene.processes.events = ["one"]
    keeper = scene.open(log=fail)
    with pytest.raises(OSError, match="No space left"):
        wait_until(lambda: keeper.check())


def test_a_lost_board_is_an_error_after_a_while(scene: Scene) -> None:
    """The rank that ended may report its reason first."""
    keeper = scene.open(loss_seconds=0.3)
    wait_until(lambda: scene.processes.orders)
    scene.processes.error = NodeBoardLost("torchrun has ended")
    start = time.monotonic()
    with pytest.raises(NodeBoardLost):
        wait_until(lambda: keeper.check())
    assert time.monotonic() - start > 0.25


def test_nothing_is_maintained_after_close(scene: Scene) -> None:
    keeper = scene.open()
    wait_until(lambda: len(scene.processes.orders) > 1)
    scene.processes.pause_seconds = 0.3
    count = len(scene.processes.orders)
    wait_until(lambda: len(scene.processes.orders) > count)
    keeper.close()
    (thread,) = scene.processes.threads
    assert thread is not threading.current_thread() and not thread.is_alive()
    count = len(scene.processes.orders)
    time.sleep(0.1)
    assert len(scene.processes.orders) == count
    keeper.close()
    keeper.check()
