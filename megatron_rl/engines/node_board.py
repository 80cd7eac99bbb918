"""The place where nodes report about their processes, and where rank 0 gives them orders.

It is the key-value store of all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec
import torch.distributed as dist

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.node_reports import NodeOrders, NodeReport

_T = TypeVar("_T")

_report_decoder = msgspec.msgpack.Decoder(NodeReport)
_orders_decoder = msgspec.msgpack.Decoder(NodeOrders)


class NodeBoardLost(Failure):
    """The store of all ranks does not answer any more."""

    exit_code = ExitCode.PEER_FAILED


class NodeBoard:
    """Reports of nodes, and orders to them.

    A call never waits for a value that nobody has published. Several threads may use it, but none
    may use the same connection `store` elsewhere. Calls raise `NodeBoardLost`.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._loss: str | None = None

    def publish(self, report: NodeReport) -> None:
        """Replace the report of its node."""
        self._set(f"members/reports/{report.node}", msgspec.msgpack.encode(report))

    def read_reports(self, nodes: Iterable[int]) -> list[NodeReport]:
        """Return the last reports of those nodes that have published one."""
        values = [self._get(f"members/reports/{node}") for node in nodes]
        return [_report_decoder.decode(value) for value in values if value is not None]

    def order(self, node: int, orders: NodeOrders) -> None:
        """Replace the orders to a node."""
        self._set(f"members/orders/{node}", msgspec.msgpack.encode(orders))

    def read_orders(self, node: int) -> NodeOrders:
        """Return the orders to a node. There are none before rank 0 has given some."""
        value = self._get(f"members/orders/{node}")
        return NodeOrders() if value is None else _orders_decoder.decode(value)

    def _set(self, key: str, value: bytes) -> None:
        # torch's type declarations know only text
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def _get(self, key: str) -> bytes | None:
        return self._call(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _call(self, operation: Callable[[], _T]) -> _T:
        with self._lock:
            if self._loss is None:
                try:
                    return operation()
                except Exception as error:  # the store's errors have no common base
                    # Once only: torch prints a long stack for each failure
                    self._loss = str(error).partition("\n")[0] or type(error).__name__
        raise NodeBoardLost(
            "the key-value store of all ranks does not answer any more: torchrun or rank 0 has "
            f"ended ({self._loss})"
        )
