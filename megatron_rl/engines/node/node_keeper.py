"""A thread of each node that looks after its engines and its collector."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from megatron_rl.engines.node.node_board import NodeBoard, NodeBoardLost
from megatron_rl.engines.node.node_processes import NodeProcesses
from megatron_rl.engines.node.node_reports import NodeReport

_POLL_SECONDS = 0.5
_PUBLISH_SECONDS = 10.0
_JOIN_SECONDS = 5.0
_MAX_EVENTS = 20
# A rank that ends reports its reason in less time than this
_LOSS_SECONDS = 10.0


class NodeKeeper:
    """Maintains the processes of this node as rank 0 orders, and reports about them.

    Its thread begins at once. log: writes a line for people about each event.
    publish_seconds: after which a report is published again that has not changed.
    """

    def __init__(
        self,
        processes: NodeProcesses,
        board: NodeBoard,
        *,
        log: Callable[[str], None],
        poll_seconds: float = _POLL_SECONDS,
        publish_seconds: float = _PUBLISH_SECONDS,
        loss_seconds: float = _LOSS_SECONDS,
    ) -> None:
        self._processes = processes
        self._board = board
        self._log = log
        self._poll_seconds = poll_seconds
        self._publish_seconds = publish_seconds
        self._loss_seconds = loss_seconds
        self._events: deque[str] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._last_report: NodeReport | None = None
        self._next_publication = 0.0
        self._error: Exception | None = None
        self._error_time = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="node keeper", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread.

        `NodeBoardLost` comes ten seconds late. Another rank has ended then, and may report why.
        """
        error = self._error
        if error is None:
            return
        age = time.monotonic() - self._error_time
        if not isinstance(error, NodeBoardLost) or age >= self._loss_seconds:
            raise error

    def close(self) -> None:
        """End the thread. Call it before `NodeProcesses.stop`, and again if you like.

        A thread that starts a process is not awaited for more than five seconds.
        """
        self._end.set()
        self._thread.join(_JOIN_SECONDS)

    def _keep(self) -> None:
        try:
            while not self._end.is_set():
                self._maintain()
                self._end.wait(self._poll_seconds)
        except Exception as error:
            self._error_time = time.monotonic()
            self._error = error

    def _maintain(self) -> None:
        orders = self._board.read_orders(self._processes.node)
        report = self._processes.maintain(orders)
        for event in self._processes.take_events():
            self._log(event)
            self._events.append(event)
            self._num_events += 1
        report = msgspec.structs.replace(
            report, events=tuple(self._events), num_events=self._num_events
        )
        now = time.monotonic()
        if report != self._last_report or now >= self._next_publication:
            self._board.publish(report)
            self._last_report = report
            self._next_publication = now + self._publish_seconds
