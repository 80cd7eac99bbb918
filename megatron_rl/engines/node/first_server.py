"""The server of an engine over several nodes that answers requests, and leads the others."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.engines.node.meeting import EngineStart, Meeting, StartState
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineDied, EngineError
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.server.ports import choose_port

# Starts the server of this node, which asks its argument where the servers meet
StartServer = Callable[[Callable[[], str]], ManagedEngine]


class FirstServer:
    """The server of an engine's first node, which stands for the whole engine.

    The servers of each start meet at a port that no earlier start has used. When one of them ends,
    the engine counts as ended, and all of them are ended and started again together.

    host: this node's address.
    """

    def __init__(self, meeting: Meeting, start_server: StartServer, *, host: str) -> None:
        self._meeting = meeting
        self._host = host
        self._number = 0
        self._address = ""
        self._state = StartState.STARTING
        self._server = start_server(self._announce_start)

    @property
    def engine(self) -> Engine:
        """The engine's address and parallel sizes. See `ManagedEngine.engine`."""
        return self._server.engine

    @property
    def epoch(self) -> int:
        """The number of restarts of the engine so far."""
        return self._server.epoch

    @property
    def pid(self) -> int:
        """The process id of the supervisor of this node's server."""
        return self._server.pid

    def poll_healthy(self) -> bool:
        """Check if the engine has become healthy: all its servers have met, and it answers.

        Raises `EngineDied` and `EngineError`.
        """
        # A start that has lost its port is followed by another one, whatever the others say
        is_healthy = self._server.poll_healthy()
        self._check_others()
        if is_healthy and self._state is StartState.STARTING:
            self._announce(StartState.RUNNING)
        return is_healthy

    def check_age(self, deadline_seconds: float) -> None:
        """Raise `EngineError` if the last start is older. Call it for unhealthy engines."""
        self._server.check_age(deadline_seconds)

    def check_alive(self) -> None:
        """Raise `EngineDied` or `EngineError` if one of the servers has ended."""
        try:
            self._server.check_alive()
        except EngineDied:
            reports = self._meeting.read_reports().values()
            if any(report.is_leaving for report in reports):
                return  # the run ends, and takes the servers with it
            raise
        self._check_others()

    def request_end(self) -> None:
        """Ask all servers to end, and do not wait."""
        self._server.request_end()
        self._announce(StartState.ENDED)

    def restart(self, *, timeout: float) -> bool:
        """End what is left of this node's server, and let all servers start again.

        See `ManagedEngine.restart`.
        """
        return self._server.restart(timeout=timeout)

    def stop(self, *, timeout: float) -> None:
        """End this node's server. It cannot be started again. The other nodes end theirs."""
        self._server.stop(timeout=timeout)

    def _announce_start(self) -> str:
        self._number += 1
        self._address = f"{self._host}:{choose_port(self._host)}"
        self._announce(StartState.STARTING)
        return self._address

    def _announce(self, state: StartState) -> None:
        self._state = state
        start = EngineStart(number=self._number, address=self._address, state=state)
        self._meeting.announce(start)

    def _check_others(self) -> None:
        """Raise `EngineError` if a server of this start has ended on another node."""
        for rank, report in self._meeting.read_reports().items():
            if report.number == self._number and report.reason:
                node = self._meeting.first_node + rank
                raise EngineError(
                    f"engine {self.engine.url}: its server on node {node} ended: {report.reason}",
                    log_tail=report.log_tail,
                )
