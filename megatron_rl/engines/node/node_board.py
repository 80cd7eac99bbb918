"""The place where nodes report about their processes, and where rank 0 gives them orders.

It is the key-value store of all ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch.distributed as dist

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.node.node_reports import NodeOrders, NodeReport

# When torchrun was killed, the kernel also sends a signal, which says more than this failure
_SIGNAL_SECONDS = 1.0

_report_decoder = msgspec.msgpack.Decoder(NodeReport)
_orders_decoder = msgspec.msgpack.Decoder(NodeOrders)


class NodeBoardLost(Failure):
    """The store of all ranks does not answer any more."""

    exit_code = ExitCode.PEER_FAILED


class NodeBoard:
    """Reports of nodes, and orders to them.

    A call never waits for a value that nobody has published. Several threads may use it, but none
    may use the same connection `store` elsewhere. Calls raise `NodeBoardLost`, after
    `signal_seconds` in which a signal may come first.
    """

    def __init__(self, store: dist.Store, *, signal_seconds: float = _SIGNAL_SECONDS) -> None:
        self._store = store
        self._signal_seconds = signal_seconds
        self._lock = threading.Lock()
        self._loss: str | None = None
        # A value is replaced, but never removed
        self._published_keys: set[str] = set()

    def publish(self, report: NodeReport) -> None:
        """Replace the report of its node."""
        self._set(f"members/reports/{report.node}", msgspec.msgpack.encode(report))

    def read_reports(self, nodes: Iterable[int]) -> list[NodeReport]:
        """Return the last reports of those nodes that have published one."""
        values = self._get([f"members/reports/{node}" for node in nodes])
        return [_report_decoder.decode(value) for value in values]

    def order(self, node: int, orders: NodeOrders) -> None:
        """Replace the orders to a node."""
        self._set(f"members/orders/{node}", msgspec.msgpack.encode(orders))

    def read_orders(self, node: int) -> NodeOrders:
        """Return the orders to a node. There are none before rank 0 has given some."""
        values = self._get([f"members/orders/{node}"])
        return _orders_decoder.decode(values[0]) if values else NodeOrders()

    def write(self, key: str, value: bytes) -> None:
        """Replace another value that nodes share."""
        self._set(key, value)

    def read(self, key: str) -> bytes | None:
        """Return another value that nodes share, None before it was written."""
        values = self._get([key])
        return values[0] if values else None

    def _set(self, key: str, value: bytes) -> None:
        # torch's type declarations know only text
        self._call(lambda: self._store.set(key, value))  # type: ignore[arg-type]

    def _get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of those keys that have one."""
        return self._call(lambda: self._read_published(keys))

    def _read_published(self, keys: Sequence[str]) -> list[bytes]:
        for key in keys:
            if key not in self._published_keys and self._store.check([key]):
                self._published_keys.add(key)
        published_keys = [key for key in keys if key in self._published_keys]
        # torch would wait for the others
        return self._store.multi_get(published_keys) if published_keys else []

    def _call[T](self, operation: Callable[[], T]) -> T:
        with self._lock:
            if self._loss is None:
                try:
                    return operation()
                except Exception as error:  # the store's errors have no common base
                    # Once only: torch prints a long stack for each failure
                    self._loss = str(error).partition("\n")[0] or type(error).__name__
        time.sleep(self._signal_seconds)
        raise NodeBoardLost(
            "the key-value store of all ranks does not answer any more: torchrun or rank 0 has "
            f"ended ({self._loss})"
        )
