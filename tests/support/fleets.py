"""A board, a prober and a queue of a fleet that tests script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megatron_rl.config.schema import RecoverySettings
from megatron_rl.engines.engine_prober import ProbeResult
from megatron_rl.engines.fleet import Fleet, managed_name
from megatron_rl.engines.members import Members
from megatron_rl.engines.node.node_reports import (
    CollectorReport,
    EngineReport,
    NodeOrders,
    NodeReport,
    ProcessState,
)
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.engines.url_list import UrlList
from sglang_bridge.engine import Engine
from tests.support.clocks import FakeClock


class ScriptedBoard:
    """Returns the reports that a test has set, and notes the orders."""

    def __init__(self) -> None:
        self.reports: dict[int, NodeReport] = {}
        self.orders: list[tuple[int, NodeOrders]] = []

    def read_reports(self, nodes: Iterable[int]) -> list[NodeReport]:
        return [self.reports[node] for node in nodes if node in self.reports]

    def order(self, node: int, orders: NodeOrders) -> None:
        self.orders.append((node, orders))


class ScriptedProber:
    """Answers probes with what a test has set.

    problems: by name of an engine, why it cannot serve. silent_names: engines that never answer.
    """

    def __init__(self) -> None:
        self.problems: dict[str, str] = {}
        self.silent_names: set[str] = set()
        self.probes: list[tuple[str, int]] = []
        self.forgotten_names: list[str] = []
        self.late_results: list[ProbeResult] = []

    def probe(self, name: str, epoch: int, engine: Engine) -> None:
        self.probes.append((name, epoch))
        if name not in self.silent_names:
            self.late_results.append(ProbeResult(name, epoch, self.problems.get(name, "")))

    def forget(self, name: str) -> None:
        self.forgotten_names.append(name)

    def results(self) -> list[ProbeResult]:
        results = self.late_results
        self.late_results = []
        return results


class ScriptedQueue:
    """Notes which engines and collectors a fleet announces."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.connected_nodes = list(nodes)
        self.engines: dict[str, Engine] = {}
        self.calls: list[str] = []

    def set_engines(self, engines: Sequence[Engine]) -> None:
        new_engines = {engine.url: engine for engine in engines}
        self.calls += [f"remove {url}" for url in self.engines if url not in new_engines]
        self.calls += [f"add {url}" for url in new_engines if url not in self.engines]
        self.engines = new_engines

    def disconnect_before(self, node: int, epoch: int, reason: str) -> None:
        if epoch:
            self.calls.append(f"disconnect {node} before {epoch}: {reason}")


def _return_engine(engine: Any) -> Any:
    return engine


class NoTokenCounter:
    """In place of a `TokenCounter` where a test counts no tokens."""

    def set_engines(self, engines: Sequence[Any], *, have_sampled: bool = True) -> None: ...

    def restart(self) -> None: ...


class ScriptedFleet:
    """A fleet of one managed engine on each node, over scripted parts.

    engines: of each node, how many.
    """

    def __init__(
        self,
        engines: Sequence[int] = (1, 1),
        *,
        urls: UrlList | None = None,
        token_counter: TokenCounter | None = None,
    ) -> None:
        self.members = Members()
        nodes = range(len(engines))
        self.board = ScriptedBoard()
        self.prober = ScriptedProber()
        self.queue = ScriptedQueue(nodes)
        self.clock = FakeClock()
        self.lines: list[str] = []
        scripted_queue: Any = self.queue
        scripted_prober: Any = self.prober
        scripted_board: Any = self.board
        no_counter: Any = NoTokenCounter()
        open_counter: Any = _return_engine
        for node, count in enumerate(engines):
            for index in range(count):
                self.members.add(managed_name(node, index), engine_of(node, index))
                self.members.answer(managed_name(node, index), 0)
        self.fleet = Fleet(
            self.members,
            scripted_queue,
            scripted_prober,
            RecoverySettings(),
            board=scripted_board,
            nodes=list(nodes),
            log=self.lines.append,
            urls=urls,
            token_counter=token_counter or no_counter,
            open_counter=open_counter,
            clock=self.clock,
        )

    def sync(self, version: int) -> None:
        """Let all engines that wait or serve receive a version."""
        for member in self.members.begin_update(version):
            self.members.admit(member.name, member.epoch, version)
        self.fleet.announce()

    def join(self) -> None:
        """Let engines receive the weights that a join command names."""
        command = self.fleet.join_command()
        assert command is not None and command.only is not None and command.audit
        for name in command.only:
            self.members.admit(name, self.members[name].epoch, command.version)
        self.fleet.announce()

    def report_engine(
        self,
        node: int,
        epoch: int,
        *,
        index: int = 0,
        state: ProcessState = ProcessState.RUNNING,
        reason: str = "it was killed",
    ) -> None:
        """Report one engine of a node."""
        engine = engine_of(node, index, epoch)
        report = EngineReport(index=index, epoch=epoch, engine=engine, state=state, reason=reason)
        self.board.reports[node] = NodeReport(node=node, engines=(report,))

    def report_collector(
        self,
        node: int,
        epoch: int,
        state: ProcessState = ProcessState.STARTING,
        reason: str = "it was killed",
    ) -> None:
        """Report the collector of a node."""
        report = CollectorReport(epoch=epoch, state=state, reason=reason)
        self.board.reports[node] = NodeReport(node=node, collector=report)

    def update(self, *, can_join: bool = True) -> None:
        self.fleet.update(can_join=can_join)

    def states(self) -> list[str]:
        return [member.state.value for member in self.members]


def engine_of(node: int, index: int = 0, epoch: int = 0) -> Engine:
    """The managed engine of a node. Each start has a port of its own."""
    return Engine(url=f"http://10.0.0.{node}:{1000 * index + epoch}", node=node)
