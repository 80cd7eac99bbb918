"""Starts, maintains and ends the processes of a node besides its ranks.

They are the SGLang engines and the collector.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from megatron_rl.config.schema import EngineSettings, RecoverySettings
from megatron_rl.engines.node.collector_process import CollectorProcess
from megatron_rl.engines.node.first_server import FirstServer, StartServer
from megatron_rl.engines.node.further_server import FurtherServer
from megatron_rl.engines.node.meeting import Meeting
from megatron_rl.engines.node.node_board import NodeBoard
from megatron_rl.engines.node.node_reports import (
    CollectorReport,
    EngineReport,
    NodeOrders,
    NodeReport,
)
from megatron_rl.engines.node.restarts import RestartBudget
from megatron_rl.engines.node.upkeep import Helper, Upkeep
from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import RunKeys
from sglang_bridge.server.lifeline import Lifeline
from sglang_bridge.server.managed_engine import ManagedEngine
from sglang_bridge.settings import ServerPlace

_POLL_SECONDS = 0.2
# In which the nodes of an engine begin its first start together. Later, `wait_healthy` lets them.
_MEET_SECONDS = 5.0
_STOP_SECONDS = 15.0
# The collector below its supervisor. Further ones belong to user-defined classes, which may stop
# their own children. The collector ends a class's process that answers nothing.
_COLLECTOR_GENERATIONS = 1


class NodeProcesses:
    """The managed engines and the collector of one node. They end when this process ends.

    One thread starts them and stops them, and another one may `maintain` them meanwhile. Of an
    engine over several nodes, each node has a server. The first one looks after the engine.

    board: where nodes that share engines tell one another about them, if there are any.

    restarts_engines: False if an engine that ends is given up at once.

    Invariant: nothing is started once `stop` has begun
    (tests/engines/test_node_processes.py::test_a_stop_wins_over_a_restart).
    """

    def __init__(
        self,
        *,
        node: int,
        log_directory: Path,
        recovery: RecoverySettings | None = None,
        restarts_engines: bool = True,
        board: NodeBoard | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._board = board
        self._log_directory = log_directory
        self._recovery = recovery or RecoverySettings()
        self._restarts_engines = restarts_engines
        self._clock = clock
        self._lifeline = Lifeline()
        self._start_timeout_s = 0.0
        self._engines: list[ManagedEngine | FirstServer] = []
        self._further_servers: list[FurtherServer] = []
        # One for each engine, once all of them were healthy
        self._engine_upkeeps: tuple[Upkeep, ...] = ()
        self._collector: CollectorProcess | None = None
        self._collector_upkeep: Upkeep | None = None
        self._events: list[str] = []
        self._start_lock = threading.Lock()
        self._is_stopping = False

    @property
    def node(self) -> int:
        """The index of the node."""
        return self._node

    def start_engines(
        self, settings: EngineSettings, places: Iterable[ServerPlace], keys: RunKeys
    ) -> None:
        """Start servers without waiting for them: they load while the trainer builds its model."""
        self._start_timeout_s = settings.start_timeout_s
        for index, place in enumerate(places):
            start_server = partial(self._start_server, settings, place, keys, index)
            if place.num_servers == 1:
                self._engines.append(start_server())
            else:
                self._start_part(index, place, start_server)
        deadline = time.monotonic() + _MEET_SECONDS
        while time.monotonic() < deadline and not self._have_met():
            time.sleep(_POLL_SECONDS)

    def wait_healthy(self, timeout_seconds: float) -> list[Engine]:
        """Wait until every engine with a server here answers, and return those this node leads.

        From then on, `maintain` looks after them. Raises `EngineError` or `EngineDied` with the
        last lines of the log.
        """
        unhealthy = list(self._engines)
        silent = list(self._further_servers)
        start = time.monotonic()
        while unhealthy or silent:
            seconds = time.monotonic() - start
            if seconds > timeout_seconds and unhealthy:
                # Raises, with the log of this engine
                unhealthy[0].check_age(0.0)
            elif seconds > timeout_seconds:
                silent[0].check_first_start(seconds)
            unhealthy = [engine for engine in unhealthy if not engine.poll_healthy()]
            silent = [server for server in silent if not server.follow()]
            if unhealthy or silent:
                time.sleep(_POLL_SECONDS)
        self._engine_upkeeps = tuple(
            self._look_after(
                f"engine {index} of node {self._node}", engine, "answers", self._engine_budget()
            )
            for index, engine in enumerate(self._engines)
        )
        return [engine.engine for engine in self._engines]

    def start_collector(self, hub: tuple[str, int], run_key: str) -> None:
        """Start the collector. Does nothing after `stop` began.

        hub: host and port of rank 0's hub.
        """
        with self._start_lock:
            if self._is_stopping:
                return
            collector = CollectorProcess(
                node=self._node,
                hub=hub,
                run_key=run_key,
                log_path=self._log_directory / f"collector-{self._node}.log",
                lifeline=self._lifeline,
            )
            self._collector = collector
        self._collector_upkeep = self._look_after(
            f"the collector of node {self._node}",
            collector,
            "runs",
            self._budget(),
            generations=_COLLECTOR_GENERATIONS,
        )

    def maintain(self, orders: NodeOrders) -> NodeReport:
        """Start processes again that ended, hang or have to end, as often as the settings allow.

        Call it about every half second, from one thread. It raises nothing about these processes.
        An ended process is reported at once, and started again in a later call. Does nothing after
        `stop` began.
        """
        if not self._is_stopping:
            for server in self._further_servers:
                server.follow()
            for index, upkeep in enumerate(self._engine_upkeeps):
                upkeep.maintain(
                    ordered_epoch=orders.restart_engines.get(index),
                    order_reason=orders.reasons.get(f"engine {index}", ""),
                )
            if self._collector_upkeep is not None:
                self._collector_upkeep.maintain(
                    ordered_epoch=orders.restart_collector,
                    order_reason=orders.reasons.get("collector", ""),
                )
        return self._report()

    def take_events(self) -> list[str]:
        """Return lines for people about what `maintain` did since the last call."""
        events = self._events
        self._events = []
        # A stop ends processes on purpose
        return [] if self._is_stopping else events

    def stop(self, timeout_seconds: float = _STOP_SECONDS) -> None:
        """End all processes at the same time, also those that another thread starts just now.

        A process that does not end within `timeout_seconds` is killed. You may call this again.
        """
        with self._start_lock:
            self._is_stopping = True
        servers = [*self._engines, *self._further_servers]
        with ThreadPoolExecutor(max_workers=len(servers) + 1) as pool:
            if self._collector is not None:
                pool.submit(self._collector.stop, timeout=timeout_seconds)
            for server in servers:
                pool.submit(_stop_server, server, timeout_seconds)
        self._lifeline.close()

    def _start_server(
        self,
        settings: EngineSettings,
        place: ServerPlace,
        keys: RunKeys,
        index: int,
        meet: Callable[[], str] | None = None,
    ) -> ManagedEngine:
        return ManagedEngine.start(
            settings,
            place,
            keys=keys,
            log_path=self._log_directory / f"engine-{self._node}-{index}.log",
            lifeline=self._lifeline,
            meet=meet,
        )

    def _start_part(self, index: int, place: ServerPlace, start_server: StartServer) -> None:
        """Start this node's server of an engine over several nodes.

        A further one starts once the first one is announced.
        """
        if self._board is None:
            raise RuntimeError("nodes that share engines need a board")
        meeting = Meeting(
            self._board,
            first_node=self._node - place.server_rank,
            index=index,
            num_servers=place.num_servers,
        )
        if place.server_rank:
            server = FurtherServer(meeting, place.server_rank, start_server, clock=self._clock)
            self._further_servers.append(server)
        else:
            self._engines.append(FirstServer(meeting, start_server, host=place.host))

    def _have_met(self) -> bool:
        """Start the further servers of this node that are announced. True once all have started."""
        for server in self._further_servers:
            if not server.is_started:
                server.follow()
        return all(server.is_started for server in self._further_servers)

    def _budget(self) -> RestartBudget:
        return RestartBudget(self._recovery.restarts_per_hour, clock=self._clock)

    def _engine_budget(self) -> RestartBudget:
        if self._restarts_engines:
            return self._budget()
        return RestartBudget(0, rule="engine.colocated=true", clock=self._clock)

    def _look_after(
        self,
        name: str,
        helper: Helper,
        word: str,
        budget: RestartBudget,
        *,
        generations: int | None = None,
    ) -> Upkeep:
        return Upkeep(
            name,
            helper,
            budget,
            word=word,
            start_timeout_s=self._start_timeout_s,
            log=lambda text: self._events.append(text),
            generations=generations,
            clock=self._clock,
        )

    def _report(self) -> NodeReport:
        engines = [
            EngineReport(
                index=index,
                epoch=engine.epoch,
                engine=engine.engine,
                state=upkeep.state,
                reason=upkeep.reason,
            )
            for index, (engine, upkeep) in enumerate(
                zip(self._engines, self._engine_upkeeps, strict=False)
            )
        ]
        collector = None
        if self._collector is not None and self._collector_upkeep is not None:
            collector = CollectorReport(
                epoch=self._collector.epoch,
                state=self._collector_upkeep.state,
                reason=self._collector_upkeep.reason,
            )
        return NodeReport(node=self._node, engines=tuple(engines), collector=collector)


def _stop_server(
    server: ManagedEngine | FirstServer | FurtherServer, timeout_seconds: float
) -> None:
    # It may have ended already, or the disk has no space to record a removal
    with contextlib.suppress(EngineError, OSError):
        server.stop(timeout=timeout_seconds)
