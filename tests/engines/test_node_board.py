"""Reports and orders on the store of all ranks. The end of that store has a name."""

import datetime
import subprocess
import sys
import threading
import time

import msgspec
import pytest
import torch.distributed as dist

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.engines.node.node_board import NodeBoard, NodeBoardLost
from megatron_rl.engines.node.node_reports import (
    CollectorReport,
    EngineReport,
    NodeOrders,
    NodeReport,
    ProcessState,
)
from sglang_bridge.engine import Engine

REPORT = NodeReport(
    node=1,
    engines=(
        EngineReport(
            index=1,
            epoch=200,
            engine=Engine(url="http://127.0.0.1:1", node=1, tp=2, ep=2),
            state=ProcessState.GIVEN_UP,
            reason="größer",
        ),
    ),
    collector=CollectorReport(epoch=70_000, state=ProcessState.STARTING, reason="it ended"),
)
SERVE_STORE = """
import time
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> dist.Store:
    if request.param == "hash":
        return dist.HashStore()
    return dist.PrefixStore("attempt_0", dist.TCPStore("127.0.0.1", 0, 1, True))


def test_only_nodes_that_have_reported_are_read(store: dist.Store) -> None:
    board = NodeBoard(store)
    assert board.read_reports([0, 1, 2]) == []
    board.publish(NodeReport(node=1))
    board.publish(REPORT)
    board.publish(NodeReport(node=2))
    assert board.read_reports([0, 1, 2]) == [REPORT, NodeReport(node=2)]
    assert board.read_reports([2]) == [NodeReport(node=2)]


def test_a_node_reads_its_last_orders(store: dist.Store) -> None:
    board = NodeBoard(store)
    orders = NodeOrders(
        restart_engines={0: 3, 200: 1}, restart_collector=0, reasons={"engine 0": "it lies"}
    )
    assert board.read_orders(1) == NodeOrders()
    board.order(1, NodeOrders(restart_collector=1))
    board.order(1, orders)
    assert (board.read_orders(0), board.read_orders(1)) == (NodeOrders(), orders)


def test_keys_are_apart_from_those_of_others() -> None:
    store = dist.HashStore()
    board = NodeBoard(store)
    board.publish(REPORT)
    board.order(0, NodeOrders())
    assert store.num_keys() == 2
    assert store.check(["members/reports/1"]) and store.check(["members/orders/0"])


def test_a_report_that_breaks_the_contract_is_refused() -> None:
    store = dist.HashStore()
    board = NodeBoard(store)
    store.set("members/reports/0", msgspec.msgpack.encode({"node": -1}))  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError, match=">= 0"):
        board.read_reports([0])


@pytest.mark.slow
def test_a_lost_store_is_a_failure_of_a_peer() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVE_STORE], stdout=subprocess.PIPE)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    timeout = datetime.timedelta(seconds=10)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout)
    board = NodeBoard(store, signal_seconds=0.1)
    board.publish(REPORT)
    server.kill()
    server.communicate()
    with pytest.raises(NodeBoardLost, match="torchrun or rank 0 has ended"):
        for _ in range(2):  # the first message only fills a buffer
            board.publish(REPORT)
    start = time.monotonic()
    for call in (lambda: board.read_reports([1]), lambda: board.read_orders(1)):
        with pytest.raises(NodeBoardLost) as error_info:
            call()
    assert time.monotonic() - start >= 0.2, "a signal has no time to come first"
    assert error_info.value.exit_code == ExitCode.PEER_FAILED


class SlowStore:
    """Bears one call at a time, as a connection does."""

    is_busy = False
    num_calls = 0

    def set(self, key: str, value: bytes) -> None:
        assert not self.is_busy
        self.is_busy = True
        time.sleep(0.002)
        self.is_busy = False
        self.num_calls += 1


def test_threads_use_the_connection_one_after_the_other() -> None:
    store = SlowStore()
    board = NodeBoard(store)  # type: ignore[arg-type]

    def publish() -> None:
        for _ in range(20):
            board.publish(REPORT)

    threads = [threading.Thread(target=publish) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.num_calls == 60
