"""A server of an engine over several nodes that an earlier node leads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.engines.node.first_server import StartServer
from megatron_rl.engines.node.frozen_processes import FrozenProcesses
from megatron_rl.engines.node.meeting import EngineStart, Meeting, ServerReport, StartState
from megatron_rl.engines.node.node_board import NodeBoardLost
from sglang_bridge.errors import EngineDied, EngineError
from sglang_bridge.server.managed_engine import ManagedEngine

_END_SECONDS = 8.0


class FurtherServer:
    """This node's server of an engine that an earlier node leads.

    It is started and ended as the first node announces, and reports if it ends by itself.

    rank: its number among the servers of the engine, from 1.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        start_server: StartServer,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._meeting = meeting
        self._rank = rank
        self._start_server = start_server
        self._clock = clock
        self._number = 0  # of the start that this server belongs to
        self._address = ""
        self._server: ManagedEngine | None = None
        self._may_run = False
        self._is_known = False  # with all its processes
        self._frozen_processes = FrozenProcesses(clock=clock)

    @property
    def is_started(self) -> bool:
        """True once this node has started its server for the first time."""
        return self._server is not None

    @property
    def pid(self) -> int:
        """The process id of the server's supervisor. Raises `RuntimeError` before the start."""
        if self._server is None:
            raise RuntimeError("the server was never started")
        return self._server.pid

    def follow(self) -> bool:
        """Do what the first node has announced. Returns True while the engine answers.

        An end of the server raises nothing: it is reported to the first node.
        """
        start = self._meeting.read_start()
        if start is None:
            return False
        is_new = start.number > self._number
        if start.state is StartState.ENDED:
            self._end()
        elif is_new:
            self._take_part(start)
        else:
            self._observe(start)
        return start.state is StartState.RUNNING and self._may_run

    def check_first_start(self, seconds: float) -> None:
        """Raise `EngineError`: the engine does not answer so long after its first start."""
        first = self._meeting.first_node
        what = f"the engine that node {first} leads"
        if self._server is None:
            raise EngineError(
                f"{what} was not announced within {seconds:.0f} s: see the log of node {first}"
            )
        raise EngineError(
            f"{what} was not healthy {seconds:.0f} s after its start; raise "
            f"engine.start_timeout_s or read {self._server.log_path}",
            log_tail=self._server.log_tail(),
        )

    def stop(self, *, timeout: float) -> None:
        """End the server because the run ends. It cannot be started again."""
        report = ServerReport(number=self._number, is_leaving=True)
        with contextlib.suppress(NodeBoardLost):
            self._meeting.report(self._rank, report)
        if self._server is not None:
            self._server.stop(timeout=timeout)

    def _take_part(self, start: EngineStart) -> None:
        """Start the server for a new start of the engine, after its earlier one has ended."""
        self._number = start.number
        self._address = start.address
        self._frozen_processes = FrozenProcesses(clock=self._clock)
        self._is_known = False
        try:
            if self._server is None:
                self._server = self._start_server(lambda: self._address)
            else:
                self._server.restart(timeout=_END_SECONDS)
            self._may_run = True
        except (EngineError, OSError) as error:
            self._report_end(str(error))

    def _observe(self, start: EngineStart) -> None:
        if self._server is None or not self._may_run:
            return
        if start.state is StartState.RUNNING and not self._is_known:
            self._server.note_processes()
            self._is_known = True
        try:
            self._frozen_processes.check({"it": self._server.pid})
            self._server.check_alive()
        except EngineDied as error:
            self._report_end(str(error), error.log_tail)
        except (Failure, EngineError) as error:
            self._report_end(str(error))

    def _report_end(self, reason: str, log_tail: str = "") -> None:
        self._end()
        report = ServerReport(number=self._number, reason=reason, log_tail=log_tail)
        self._meeting.report(self._rank, report)

    def _end(self) -> None:
        """Ask the server to end, and do not wait."""
        if self._server is not None and self._may_run:
            self._server.request_end()
        self._may_run = False
