"""Decides which engines serve, from what nodes, collectors and probes report. Rank 0 only."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.config.schema import RecoverySettings
from megatron_rl.contracts.commands import Sync
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.engine_prober import EngineProber
from megatron_rl.engines.members import Member, Members, MemberState
from megatron_rl.engines.node.node_board import NodeBoard
from megatron_rl.engines.node.node_reports import (
    CollectorReport,
    EngineReport,
    NodeOrders,
    NodeReport,
    ProcessState,
)
from megatron_rl.engines.node.restarts import RestartBudget
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.engines.url_list import UrlList
from megatron_rl.rollouts.queue import RolloutQueue
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine

# A managed engine that failed so often since its start is started again.
_MAX_FAILURES_PER_START = 3
# So is one that does not answer for so long, although its process lives.
_MAX_SILENT_SECONDS = 45.0
# The run waits for so long while nothing serves: restarts of an engine take up to half of it.
MAX_OUTAGE_SECONDS = 900.0


class NoEngineLeft(Failure):
    """No engine, or no collector, serves, and none came back in time."""

    exit_code = ExitCode.ENGINE_FAILED


def managed_name(node: int, index: int) -> str:
    """Return the name of a managed engine. index: its number on the node."""
    return f"{index} of node {node}"


@dataclass(frozen=True)
class _AnnouncedEngine:
    """An engine as collectors know it. epoch: counts its starts."""

    engine: Engine
    epoch: int


class Fleet:
    """The engines and collectors of a run, as rank 0 sees and changes them.

    members: the engines. It may lack engines that `urls` names. board: None without managed
    processes. nodes: nodes that report. urls: the list of external engines that changes during the
    run, if any. open_counter: opens the client that reads an engine's count of tokens.
    """

    def __init__(
        self,
        members: Members,
        queue: RolloutQueue,
        prober: EngineProber,
        settings: RecoverySettings,
        *,
        board: NodeBoard,
        nodes: Sequence[int],
        log: Callable[[str], None],
        token_counter: TokenCounter,
        open_counter: Callable[[Engine], AdminClient],
        urls: UrlList | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.members = members
        self._queue = queue
        self._prober = prober
        self._settings = settings
        self._board = board
        self._nodes = nodes
        self._log = log
        self._urls = urls
        self._token_counter = token_counter
        self._open_counter = open_counter
        self._clock = clock
        # By the name of an engine that serves: as collectors know it
        self._announced_engines: dict[str, _AnnouncedEngine] = {}
        self._starting_names: set[str] = set()  # of managed engines whose node waits for them
        self._absent_since: dict[str, float] = {}
        self._problems: dict[str, str] = {}  # the last one that was written, by name
        self._orders: dict[int, NodeOrders] = {}
        self._collectors_given_up: dict[int, str] = {}
        self._num_events = Counter[int]()  # printed events, by node
        self._out_since: float | None = None
        self._has_started = False

    def update(self, *, can_join: bool) -> None:
        """Do what `refresh` does, and limit the time without engines or collectors.

        can_join: engines could receive the weights now. If not, the time without engines does not
        count. Raises `NoEngineLeft`.
        """
        self.refresh()
        self._limit_outage(counts=can_join)

    def refresh(self) -> None:
        """Take in all that was reported, and tell collectors and nodes what follows from it."""
        for report in self._board.read_reports(self._nodes):
            self._take_report(report)
        if self._urls is not None:
            self._take_urls(self._urls)
        self._take_probes()
        self._probe_absent()
        self._restart_unusable()
        self.announce()

    def join_command(self) -> Sync | None:
        """Return the command that gives waiting engines the weights; None if none waits."""
        names = tuple(member.name for member in self.members.waiting)
        if not names or self.members.version is None:
            return None
        return Sync(version=self.members.version, audit=True, only=names)

    def admit_without_weights(self) -> None:
        """Let waiting engines serve with the weights that they have loaded themselves."""
        for member in self.members.waiting:
            self.members.admit(member.name, member.epoch, None)
        self.announce()

    def announce(self) -> None:
        """Let collectors use the engines that serve."""
        serving = {member.name: member for member in self.members.serving}
        have_sampled = self._has_started
        has_changed = self._announce_leaves(serving)
        has_changed |= self._announce_joins(serving)
        if has_changed:
            self._count_tokens_of(serving, have_sampled=have_sampled)

    def _announce_leaves(self, serving: dict[str, Member]) -> bool:
        """Take engines that serve no longer from collectors. Returns True if there are any.

        An engine that was started again leaves, too: collectors forget its failures.
        """
        left_names = []
        for name, entry in self._announced_engines.items():
            member = serving.get(name)
            if member is None or (member.url, member.epoch) != (
                entry.engine.url,
                entry.epoch,
            ):
                left_names.append(name)
        old_entries = {name: self._announced_engines.pop(name) for name in left_names}
        if old_entries:
            self._send_engines()
        for name, entry in old_entries.items():
            self._log(f"engine {name} ({entry.engine.url}) serves no longer: {self._reason(name)}")
        return bool(old_entries)

    def _announce_joins(self, serving: dict[str, Member]) -> bool:
        """Let collectors use the engines that serve from now on. Returns True if there are any."""
        new_members = [
            member for name, member in serving.items() if name not in self._announced_engines
        ]
        for member in new_members:
            self._announced_engines[member.name] = _AnnouncedEngine(member.engine, member.epoch)
            self._problems.pop(member.name, None)
            if member.num_failures < _MAX_FAILURES_PER_START:
                self._prober.forget(member.name)
            if self._has_started:
                self._log(f"engine {member.name} ({member.url}) serves")
        if new_members:
            self._send_engines()
        self._has_started |= bool(new_members)
        return bool(new_members)

    def _send_engines(self) -> None:
        engines = [entry.engine for entry in self._announced_engines.values()]
        self._queue.set_engines(engines)

    def _count_tokens_of(self, serving: dict[str, Member], *, have_sampled: bool) -> None:
        """Count the tokens of the engines that serve, by name."""
        counters = [self._open_counter(member.engine) for member in serving.values()]
        self._token_counter.set_engines(counters, have_sampled=have_sampled)

    def handle_engine_failure(self, url: str, reason: str) -> None:
        """A collector does not use an engine any more, because it failed."""
        member = self.members.of_url(url)
        if member is None or member.state is not MemberState.SERVING:
            return
        self.members.fail(member.name, member.epoch, reason)

    def handle_lost_collector(self, node: int, epoch: int, reason: str) -> None:
        """The collector of a node is gone. Its process may live and hang."""
        self._token_counter.restart()
        orders = self._orders.get(node, NodeOrders())
        self._order(
            node,
            NodeOrders(
                restart_engines=orders.restart_engines,
                restart_collector=epoch,
                reasons=orders.reasons | {"collector": reason},
            ),
        )

    def _take_report(self, report: NodeReport) -> None:
        for engine in report.engines:
            self._take_engine(report.node, engine)
        if report.collector is not None:
            self._take_collector(report.node, report.collector)
        if report.node:  # the node of rank 0 prints its events itself
            self._print_events(report)

    def _print_events(self, report: NodeReport) -> None:
        """Print what happened on another node since its last report."""
        num_new = report.num_events - self._num_events[report.node]
        self._num_events[report.node] = report.num_events
        for event in report.events[-num_new:] if num_new else ():
            self._log(event)

    def _take_engine(self, node: int, report: EngineReport) -> None:
        name = managed_name(node, report.index)
        if report.state is ProcessState.GIVEN_UP:
            if self.members.leave(name, report.reason):
                self._log(f"engine {name} is given up: {report.reason}")
            return
        self.members.start(name, report.engine, report.epoch, report.reason)
        if report.state is ProcessState.STARTING:
            # Its process has ended. The next start has another epoch, which is reported later.
            self.members.fail(name, report.epoch, report.reason)
            self._starting_names.add(name)
        elif name in self._starting_names:
            self._starting_names.remove(name)
            self._prober.forget(name)

    def _take_collector(self, node: int, report: CollectorReport) -> None:
        self._queue.disconnect_before(node, report.epoch, "ended")
        if report.state is ProcessState.GIVEN_UP and node not in self._collectors_given_up:
            self._collectors_given_up[node] = report.reason
            self._queue.disconnect_before(node, report.epoch + 1, "is given up")
            self._log(f"the collector of node {node} is given up: {report.reason}")

    def _take_urls(self, urls: UrlList) -> None:
        """Add and remove external engines."""
        listed_urls = urls.read()
        if listed_urls is None:
            return
        for member in list(self.members):
            if member.name not in listed_urls and self.members.leave(
                member.name, f"it was removed from {urls.path}"
            ):
                self._log(f"engine {member.name} was removed from {urls.path}")
        for url in listed_urls:
            if url not in self.members or self.members[url].state is MemberState.GONE:
                self.members.add(url, urls.engine(url, self._emptiest_node()))
                self._prober.forget(url)
                self._log(f"engine {url} was added in {urls.path}: it serves once it is synced")

    def _emptiest_node(self) -> int:
        """Return the connected node with the fewest engines."""
        nodes = self._queue.connected_nodes or list(self._nodes)
        counts = dict.fromkeys(nodes, 0)
        for member in self.members:
            if member.state is not MemberState.GONE and member.engine.node in counts:
                counts[member.engine.node] += 1
        return min(nodes, key=lambda node: (counts[node], node))

    def _take_probes(self) -> None:
        for result in self._prober.results():
            if result.name not in self.members:
                continue
            problem = result.problem or self._join_obstacle(self.members[result.name])
            if not problem:
                self.members.answer(result.name, result.epoch, result.engine)
            elif self._problems.get(result.name) != problem:
                self._problems[result.name] = problem
                self._log(f"engine {result.name} cannot serve: {problem}")

    def _join_obstacle(self, member: Member) -> str:
        """Return why an engine that answers may not join now, empty if it may.

        Each try holds all ranks up. A node limits the starts of its own engines. The joins of an
        external engine after a failure have the same limit while others serve.
        """
        is_back = member.state is MemberState.OUT and member.num_failures > 0
        if member.name != member.url or not is_back:
            return ""
        limit = self._settings.restarts_per_hour
        if member.joins is None:
            member.joins = RestartBudget(limit, clock=self._clock)
        if member.joins.request(member.reason) is not None or not self.members.serving:
            return ""
        return (
            f"{member.reason}. It has joined {limit} times within an hour, as often as "
            f"{member.joins.rule} allows: it joins again when that is over, or if no other engine "
            "serves"
        )

    def _probe_absent(self) -> None:
        for member in self.members.absent:
            if member.name in self._starting_names:
                continue
            self._prober.probe(member.name, member.epoch, member.engine)

    def _restart_unusable(self) -> None:
        """Order restarts of managed engines that live and cannot be used."""
        now = self._clock()
        absent = {member.name: member for member in self.members.absent}
        self._absent_since = {name: self._absent_since.get(name, now) for name in absent}
        for node in self._nodes:
            restarts = dict(self._orders.get(node, NodeOrders()).restart_engines)
            reasons = dict(self._orders.get(node, NodeOrders()).reasons)
            for index, member in self._managed_members(node, absent):
                reason = self._restart_reason(member, now - self._absent_since[member.name])
                if reason and restarts.get(index) != member.epoch:
                    restarts[index] = member.epoch
                    reasons[f"engine {index}"] = reason
                    self._log(f"engine {member.name} is started again: {reason}")
            orders = self._orders.get(node, NodeOrders())
            if restarts != orders.restart_engines:
                self._order(
                    node,
                    NodeOrders(
                        restart_engines=restarts,
                        restart_collector=orders.restart_collector,
                        reasons=reasons,
                    ),
                )

    def _managed_members(
        self, node: int, absent: dict[str, Member]
    ) -> Iterable[tuple[int, Member]]:
        """Yield the absent engines of a node that it can start again, with their numbers."""
        index = 0
        while managed_name(node, index) in self.members:
            member = absent.get(managed_name(node, index))
            if member is not None:
                yield index, member
            index += 1

    def _restart_reason(self, member: Member, absent_seconds: float) -> str:
        """Return why an engine that served must be started again, empty if it must not."""
        if member.num_failures >= _MAX_FAILURES_PER_START:
            return f"it failed {member.num_failures} times: {member.reason}"
        # The first start of an engine takes its time, which its node limits
        if member.num_failures and absent_seconds > _MAX_SILENT_SECONDS:
            return f"it did not answer for {absent_seconds:.0f} s"
        return ""

    def _order(self, node: int, orders: NodeOrders) -> None:
        self._orders[node] = orders
        self._board.order(node, orders)

    def _limit_outage(self, *, counts: bool) -> None:
        """Raise `NoEngineLeft` when nothing has served for too long, or nothing can.

        counts: whether the time without engines counts. That without collectors always does.
        """
        problem = self._outage() if counts else self._collector_outage()
        if not problem:
            self._out_since = None
            return
        now = self._clock()
        if self._out_since is None:
            self._out_since = now
            self._log(f"{problem}. The run waits for {MAX_OUTAGE_SECONDS:.0f} s")
        if now - self._out_since > MAX_OUTAGE_SECONDS:
            raise NoEngineLeft(
                f"{problem}, for longer than {MAX_OUTAGE_SECONDS:.0f} s. See the logs of the "
                "engines and collectors in the run directory"
            )

    def _outage(self) -> str:
        """Describe why nothing serves, or return an empty string. Raises `NoEngineLeft`."""
        if not self.members.serving:
            reasons = "; ".join(f"engine {m.name}: {m.reason}" for m in self.members if m.reason)
            may_return = self._urls is not None  # people may add engines to the list
            if not may_return and all(m.state is MemberState.GONE for m in self.members):
                raise NoEngineLeft(f"every engine has left the run. {reasons}")
            return f"no engine serves ({reasons})"
        return self._collector_outage()

    def _collector_outage(self) -> str:
        """Describe why no collector works, or return an empty string. Raises `NoEngineLeft`."""
        if self._queue.connected_nodes:
            return ""
        if len(self._collectors_given_up) == len(self._nodes):
            reasons = "; ".join(self._collectors_given_up.values())
            raise NoEngineLeft(f"every collector is given up: {reasons}")
        return "no collector is connected"

    def _reason(self, name: str) -> str:
        return self.members[name].reason or "it has to receive the weights again"
