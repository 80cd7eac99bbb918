"""A run of simulated engines, collectors and nodes around the real hub, queue, fleet and sync.

Time is simulated too: it passes while rank 0 waits for messages, and when a test says so.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import zmq

from megatron_rl.config.schema import RecoverySettings, RolloutSettings, SyncSettings
from megatron_rl.contracts.commands import Command, Sync
from megatron_rl.contracts.group import Group
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.engines.engine_prober import ProbeResult
from megatron_rl.engines.fleet import Fleet, managed_name
from megatron_rl.engines.members import Members, MemberState
from megatron_rl.engines.node.node_reports import (
    CollectorReport,
    EngineReport,
    NodeOrders,
    NodeReport,
    ProcessState,
)
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import (
    Alive,
    Configure,
    Drop,
    EngineLeftOut,
    FromCollector,
    GroupDone,
    GroupRequest,
    Serve,
    Stop,
    ToCollector,
    collector_name,
)
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed, WeightMismatch, WeightUpdateFailed
from sglang_bridge.weights.source import SoleSource
from sglang_bridge.weights.updater import UpdateSummary
from tests.support.clocks import FakeClock
from tests.support.collectors import request
from tests.support.fake_engine import configuration
from tests.support.fleets import NoTokenCounter

_TO_COLLECTOR = msgspec.msgpack.Decoder(ToCollector)
_CONFIGURATION = configuration()
_RESTARTS = 3  # of each process
# Rank 0 looks for reports about every second. Some waits take longer: a silent engine is started
# again after 45 seconds.
_MAX_QUIET_SECONDS = 400
_POLL_SECONDS = 1e-5  # of a look at the socket


class OutOfTime(Exception):
    """The simulated time that rank 0 may wait for messages has passed."""


@dataclass(eq=False)
class SimulatedEngine:
    """The process of an engine.

    version: of the weights that it holds. is_audited: since its start. refuses: it takes no
    weights. spoils: it holds others than it was sent. is_known: rank 0 learns of its start.
    """

    url: str
    is_known: bool = True
    is_alive: bool = True
    is_hung: bool = False
    refuses: bool = False
    spoils: bool = False
    version: int = -1
    is_audited: bool = False

    @property
    def answers(self) -> bool:
        return self.is_alive and not self.is_hung

    def heal(self) -> None:
        self.is_hung = self.refuses = self.spoils = False


class SimulatedCollector:
    """The process of a node's collector, with a pool of engines."""

    def __init__(self, run: SimulatedRun, node: int, epoch: int) -> None:
        self.node = node
        self.epoch = epoch
        self.is_alive = True
        self.is_hung = False
        self.inbox: deque[ToCollector] = deque()
        self.pool: dict[str, bool] = {}  # by URL: True for engines that get no requests
        self._own_urls: set[str] = set()
        self.requests: dict[str, GroupRequest] = {}
        self.held_groups: set[str] = set()
        self._run = run
        self._version: int | None = None
        self._is_configured = False
        run.router.collectors[self.name] = self
        self.send(Alive())

    @property
    def name(self) -> bytes:
        return collector_name(self.node, self.epoch).encode()

    @property
    def runs(self) -> bool:
        return self.is_alive and not self.is_hung

    def send(self, message: FromCollector) -> None:
        self.send_raw(msgspec.msgpack.encode(message))

    def send_raw(self, data: bytes) -> None:
        self._run.router.incoming.append((self.name, data))

    def end(self) -> None:
        self.is_alive = False
        self._run.router.collectors.pop(self.name, None)

    @property
    def used_urls(self) -> list[str]:
        """The engines that get requests: its node's, or others if it has none."""
        urls = [url for url, is_left_out in self.pool.items() if not is_left_out]
        return [url for url in urls if url in self._own_urls] or urls

    def step(self, num_requests: int) -> None:
        """Send a heartbeat, handle messages, and work on some requests."""
        self.send(Alive())
        while self.inbox and self.is_alive:
            self._handle(self.inbox.popleft())
        if self.is_alive:
            self.answer(num_requests)

    def answer(self, num_requests: int) -> None:
        """Work on some requests, whatever has arrived since."""
        for waiting_request in list(self.requests.values())[:num_requests]:
            self._work(waiting_request)

    def _handle(self, message: ToCollector) -> None:
        assert self._is_configured or isinstance(message, Configure | Stop), (
            f"{self.name!r} got {type(message).__name__} before its configuration"
        )
        match message:
            case Configure():
                assert not self._is_configured
                self._is_configured = True
            case GroupRequest(group_id=group_id):
                assert group_id not in self.requests and group_id not in self.held_groups
                self.requests[group_id] = message
            case Drop(group_ids):
                for group_id in group_ids:
                    self.requests.pop(group_id, None)
                self.held_groups -= set(group_ids)
            case Serve(engines=engines, version=version):
                # An engine that gets no requests stays so until it is missing
                self.pool = {engine.url: self.pool.get(engine.url, False) for engine in engines}
                self._own_urls = {engine.url for engine in engines if engine.node == self.node}
                self._version = version
            case Stop():
                self.end()

    def _work(self, waiting_request: GroupRequest) -> None:
        """Answer a request, or leave an engine out."""
        urls = self.used_urls
        if not urls:
            return
        url = urls[len(self.requests) % len(urls)]
        engine = self._run.engines[url]
        is_cut_off = (self.node, url) in self._run.cut_routes
        if is_cut_off or not engine.answers or engine.version != self._version:
            self.pool[url] = True
            self.send(EngineLeftOut(url, "it does not answer, or another version does"))
            return
        del self.requests[waiting_request.group_id]
        if not waiting_request.evaluation:
            self.held_groups.add(waiting_request.group_id)
        is_trusted = engine.is_audited or not engine.is_known
        group = Group(
            group_id=waiting_request.group_id,
            prompt=waiting_request.prompt,
            rollouts=(),
            environment_error=f"{engine.version} {is_trusted}",
        )
        attempt = waiting_request.attempt
        self.send(GroupDone(group=group, generated_tokens=1, attempt=attempt))


class FakeRouter:
    """The socket of the hub. Waiting on it lets the simulated time pass.

    collectors: the live ones, by name.
    """

    def __init__(self, run: SimulatedRun) -> None:
        self._run = run
        self.incoming: deque[tuple[bytes, bytes]] = deque()
        self.collectors: dict[bytes, SimulatedCollector] = {}

    def poll(self, milliseconds: int) -> bool:
        self._run.clock.now += _POLL_SECONDS
        if not self.incoming and milliseconds:
            self._run.pass_time(milliseconds / 1000)
        return bool(self.incoming)

    def recv_multipart(self) -> tuple[bytes, bytes]:
        return self.incoming.popleft()

    def send_multipart(self, parts: Sequence[bytes]) -> None:
        address, data = parts
        if address not in self.collectors:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        self.collectors[address].inbox.append(_TO_COLLECTOR.decode(data))

    def bind(self, address: str) -> None: ...

    def get_string(self, option: int) -> str:
        return "tcp://127.0.0.1:1"


@dataclass
class ManagedProcess:
    """One of a node's processes, and what the node knows about it."""

    process: Any
    epoch: int = 0
    state: ProcessState = ProcessState.RUNNING
    num_restarts: int = 0


class SimulatedNode:
    """Starts the processes of a node again, and reports them."""

    def __init__(self, run: SimulatedRun, node: int, num_engines: int) -> None:
        self.node = node
        self.orders = NodeOrders()
        self._run = run
        self.engines = [ManagedProcess(run.start_engine(node)) for _ in range(num_engines)]
        self.collector = ManagedProcess(SimulatedCollector(run, node, 0))
        self.report = self._report()

    @property
    def processes(self) -> list[ManagedProcess]:
        return [*self.engines, self.collector]

    def step(self) -> None:
        """Execute the orders, start what has ended, and report."""
        for index, entry in enumerate(self.engines):
            if self.orders.restart_engines.get(index) == entry.epoch:
                entry.process.is_alive = False
            if self._has_to_start(entry, is_alive=entry.process.is_alive):
                entry.process = self._run.start_engine(self.node, entry.process.url)
        collector = self.collector
        if self.orders.restart_collector == collector.epoch and collector.process.is_alive:
            collector.process.end()
        if self._has_to_start(collector, is_alive=collector.process.is_alive):
            collector.process = SimulatedCollector(self._run, self.node, collector.epoch)
        self.report = self._report()

    def _has_to_start(self, entry: ManagedProcess, *, is_alive: bool) -> bool:
        if is_alive:
            entry.state = ProcessState.RUNNING
            return False
        if entry.num_restarts >= _RESTARTS:
            entry.state = ProcessState.GIVEN_UP
        if entry.state is ProcessState.GIVEN_UP:
            return False
        entry.num_restarts += 1
        entry.epoch += 1
        entry.state = ProcessState.STARTING
        return True

    def _report(self) -> NodeReport:
        engines = tuple(
            EngineReport(
                index=index,
                epoch=entry.epoch,
                engine=Engine(url=entry.process.url, node=self.node),
                state=entry.state,
                reason="it was killed" if entry.epoch else "",
            )
            for index, entry in enumerate(self.engines)
        )
        collector = CollectorReport(
            epoch=self.collector.epoch, state=self.collector.state, reason="it was killed"
        )
        return NodeReport(node=self.node, engines=engines, collector=collector)


@dataclass
class SimulatedList:
    """The list of external engines."""

    urls: list[str]
    path: Path = Path("/lists/engines")
    _last_urls: list[str] = field(default_factory=list)

    def read(self) -> list[str] | None:
        if self.urls == self._last_urls:
            return None
        self._last_urls = list(self.urls)
        return self._last_urls

    def engine(self, url: str, node: int) -> Engine:
        return Engine(url=url, node=node)


@dataclass(frozen=True)
class SimulatedAdmin:
    """The control client of one start of an engine."""

    url: str


def _part(**functions: Any) -> Any:
    """Return a part of the run with these functions."""
    return SimpleNamespace(**functions)


class _Expectation:
    """A record of the weights, which needs none here."""

    def observe(self, weights: Iterator[Any]) -> Iterator[Any]:
        return weights


class SimulatedRun:
    """A run whose engines serve version 0.

    num_engines: the managed ones of each node. num_listed: external ones in the list, if there is
    no managed one. audit_every: as in `sync.audit_every`.
    """

    def __init__(
        self,
        num_engines: Sequence[int] = (1, 1),
        *,
        num_listed: int = 0,
        audit_every: int = 1,
        reuses_ports: bool = False,
    ) -> None:
        self.clock = FakeClock()
        self.engines: dict[str, SimulatedEngine] = {}  # by URL, the last process
        self.pending_groups: dict[str, GroupRequest] = {}
        self.delivered_groups: dict[str, GroupRequest] = {}
        self.trained_groups: set[str] = set()
        self.lines: list[str] = []
        self.announced_urls: set[str] = set()  # of the engines that collectors may use
        self.cut_routes: set[tuple[int, str]] = set()  # a node, and an engine it cannot reach
        self._reuses_ports = reuses_ports
        self._audited_starts: set[tuple[str, int, int]] = set()
        self._remaining_seconds = 0.0
        self._is_healthy = False
        self.num_submitted = 0
        self._probe_results: list[ProbeResult] = []
        self._patches = self._open_patches()
        self._open_parts(num_engines, num_listed, audit_every)
        self.sync()

    def _open_parts(self, num_engines: Sequence[int], num_listed: int, audit_every: int) -> None:
        self.router = FakeRouter(self)
        hub = self._open_hub()
        self.nodes = [SimulatedNode(self, node, n) for node, n in enumerate(num_engines)]
        self.queue = self._open_queue(hub)
        self.list = SimulatedList([self.start_engine(0).url for _ in range(num_listed)])
        self.members = self._open_members()
        self.connections = self._connect(audit_every, has_list=num_listed > 0)

    def close(self) -> None:
        for patch in reversed(self._patches):
            patch.stop()

    # Rank 0

    def submit(self, num_groups: int, *, evaluation: bool = False) -> None:
        """Request groups."""
        requests = []
        for _ in range(num_groups):
            self.num_submitted += 1
            name = f"g{self.num_submitted}"
            requests.append(request(name, 1 + self.num_submitted % 3, evaluation=evaluation))
        self.pending_groups |= {new.group_id: new for new in requests}
        self.queue.submit(requests)

    def collect(self, seconds: float) -> None:
        """Wait for groups until none is outstanding, or for so long."""
        self._remaining_seconds = seconds
        try:
            for group in self.queue.as_completed(self.recover):
                self._take(group)
        except OutOfTime:
            pass

    def recover(self) -> None:
        """Let engines join and leave, as rank 0 does while it waits."""
        self.connections.recover(self._run_command)

    def sync(self) -> None:
        """Send all engines new weights, as rank 0 does after a step."""
        self.connections.weights.expire()
        self.connections.refresh()
        command = self.connections.weights.next_command()
        self._run_command(command)
        self.connections.set_version(command.version)

    def train(self, num_groups: int) -> None:
        """Train on the first groups, if their rollouts can be read. Request lost ones again."""
        group_ids = list(self.delivered_groups)[:num_groups]
        lost_ids = set(self.queue.lost_groups(group_ids))
        lost_ids |= {group_id for group_id in group_ids if not self._can_read(group_id)}
        for group_id in group_ids:
            request = self.delivered_groups.pop(group_id)
            if group_id in lost_ids:
                self.pending_groups[group_id] = request
            else:
                assert group_id not in self.trained_groups
                self.trained_groups.add(group_id)
        self.queue.request_again([group_id for group_id in group_ids if group_id in lost_ids])
        self.queue.drop([group_id for group_id in group_ids if group_id not in lost_ids])

    # The world

    def start_engine(self, node: int, last_url: str = "") -> SimulatedEngine:
        """Start the process of an engine, at the address of the last one or another one."""
        url = last_url
        if not url or not self._reuses_ports:
            url = f"http://10.0.0.{node}:{1000 + len(self.engines)}"
        self.engines[url] = SimulatedEngine(url)
        return self.engines[url]

    def restart_unnoticed(self, url: str) -> None:
        """Start an external engine again at its address. Only its version tells."""
        self.engines[url] = SimulatedEngine(url, is_known=False)

    def give_up(self, entry: ManagedProcess) -> None:
        """End a process for good."""
        entry.num_restarts = _RESTARTS
        if isinstance(entry.process, SimulatedCollector):
            entry.process.end()
        else:
            entry.process.is_alive = False

    def heal(self) -> None:
        """End all faults. From now on nodes and collectors do their work as time passes."""
        self._is_healthy = True
        self.cut_routes.clear()
        for engine in list(self.engines.values()):
            engine.heal()
            if engine.url in self.list.urls and not engine.is_alive:
                self.restart_unnoticed(engine.url)
        for collector in list(self.router.collectors.values()):
            collector.is_hung = False

    def finish(self) -> None:
        """Check that everything outstanding is delivered, and can be trained on."""
        self.heal()
        self.recover()
        if not self.can_progress():
            return
        for _ in range(3):  # groups that are requested again may be lost once more
            self.collect(_MAX_QUIET_SECONDS)
            assert not self.pending_groups, self.describe()
            self.train(len(self.delivered_groups))
        assert not self.pending_groups and not self.delivered_groups
        self.check()

    def can_progress(self) -> bool:
        """Return True if there are an engine that may serve, and a collector."""
        has_engine = any(member.state is not MemberState.GONE for member in self.members)
        if not self.list.urls:
            has_engine = any(self._may_run(engine) for n in self.nodes for engine in n.engines)
        return has_engine and any(self._may_run(node.collector) for node in self.nodes)

    def pass_time(self, seconds: float) -> None:
        """Let time pass while rank 0 listens. Raises `OutOfTime`."""
        if self._remaining_seconds <= 0:
            raise OutOfTime
        self._remaining_seconds -= seconds
        self.clock.now += seconds
        if self._is_healthy:
            for node in self.nodes:
                node.step()
        for collector in list(self.router.collectors.values()):
            if collector.runs:
                collector.step(100 if self._is_healthy else 0)

    def check(self) -> None:
        """Check what holds at all times."""
        version = self.members.version
        for member in self.members.serving:
            start = (member.name, member.epoch, member.num_failures)
            assert start in self._audited_starts, f"{member} serves and was not audited"
            assert member.version == version
        connected_nodes = set(self.queue.connected_nodes)
        for collector in self.router.collectors.values():
            if collector.runs and collector.node in connected_nodes and not collector.inbox:
                pool = set(collector.used_urls)
                assert pool <= self.announced_urls, f"{collector.name!r} uses {pool}"

    def describe(self) -> str:
        """Describe why nothing goes on."""
        collectors = [
            (c.name, c.is_alive, c.pool, sorted(c.requests))
            for c in self.router.collectors.values()
        ]
        return f"{sorted(self.pending_groups)} wait: {list(self.members)}, {collectors}"

    def _may_run(self, entry: ManagedProcess) -> bool:
        return entry.process.is_alive or entry.num_restarts < _RESTARTS

    def _take(self, group: Group) -> None:
        """Note a group that is delivered."""
        assert group.group_id in self.pending_groups, f"{group.group_id} is delivered twice"
        request = self.pending_groups.pop(group.group_id)
        version, is_trusted = group.environment_error.split()
        assert int(version) == self.members.version, f"{group} has another version"
        assert is_trusted == "True", f"{group} comes from an engine that was not audited"
        if not request.evaluation:
            self.delivered_groups[group.group_id] = request

    def _can_read(self, group_id: str) -> bool:
        return any(group_id in c.held_groups for c in self.router.collectors.values())

    def _run_command(self, command: Command) -> dict[str, float]:
        assert isinstance(command, Sync)
        return self.connections.weights.send(command, SoleSource(lambda: iter(())))

    # Parts

    def _open_patches(self) -> list[Any]:
        fake_time = SimpleNamespace(monotonic=self.clock)
        patches: list[Any] = [
            mock.patch("megatron_rl.rollouts.queue.hub.time", fake_time),
            *(
                mock.patch(f"megatron_rl.rollouts.queue.{module}.time", fake_time)
                for module in ("queue", "ledger", "waiting")
            ),
            mock.patch("megatron_rl.records.reminder.time", fake_time),
            mock.patch("megatron_rl.engines.weight_sync.audit_engine", self._audit),
            mock.patch("megatron_rl.engines.weight_sync.value_obstacles", lambda engine: ()),
        ]
        for patch in patches:
            patch.start()
        return patches

    def _open_hub(self) -> CollectorHub:
        context = _part(socket=lambda kind: self.router)
        keys = _part(start=lambda: None, configure_curve_callback=lambda **callback: None)
        with (
            mock.patch("megatron_rl.rollouts.queue.hub.zmq.Context", lambda: context),
            mock.patch(
                "megatron_rl.rollouts.queue.hub.zmq.curve_keypair", lambda: (b"public", b"key")
            ),
            mock.patch("megatron_rl.rollouts.queue.hub.ThreadAuthenticator", lambda context: keys),
        ):
            return CollectorHub("127.0.0.1")

    def _open_queue(self, hub: CollectorHub) -> RolloutQueue:
        hub.wait_for(len(self.nodes), 1)
        queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=self.lines.append)
        queue.configure(dict.fromkeys(range(len(self.nodes)), _CONFIGURATION))
        set_engines = queue.set_engines

        def note_engines(engines: Sequence[Engine]) -> None:
            self.announced_urls = {engine.url for engine in engines}
            set_engines(engines)

        self._patches.append(mock.patch.object(queue, "set_engines", note_engines))
        self._patches[-1].start()
        return queue

    def _open_members(self) -> Members:
        members = Members()
        for node in self.nodes:
            for index, entry in enumerate(node.engines):
                engine = Engine(url=entry.process.url, node=node.node)
                members.add(managed_name(node.node, index), engine)
        urls = self.list.read() or []
        for n, url in enumerate(urls):
            members.add(url, Engine(url=url, node=n % len(self.nodes)))
        for member in members:
            members.answer(member.name, 0)
        return members

    def _connect(self, audit_every: int, *, has_list: bool) -> EngineConnections:
        weights = WeightSync(
            _part(
                push=self._push,
                forget=lambda admin: None,
                close=lambda: None,
                summary=UpdateSummary(),
            ),
            SyncSettings(audit_every=audit_every),
            self.members,
            make_expectation=self._make_expectation,
            open_admin=self._open_admin,
            log=self.lines.append,
        )
        urls_list: Any = self.list
        token_counter: Any = NoTokenCounter()
        fleet = Fleet(
            self.members,
            self.queue,
            _part(probe=self._probe, forget=lambda name: None, results=self._take_probe_results),
            RecoverySettings(),
            board=_part(read_reports=self._read_reports, order=self._order),
            nodes=list(range(len(self.nodes))),
            log=self.lines.append,
            urls=urls_list if has_list else None,
            token_counter=token_counter,
            open_counter=self._open_admin,
            clock=self.clock,
        )
        self.queue.on_engine_failure = fleet.handle_engine_failure
        self.queue.on_lost_collector = fleet.handle_lost_collector
        return EngineConnections(
            queue=self.queue,
            weights=weights,
            fleet=fleet,
            open_admin=self._open_admin,
            token_counter=token_counter,
        )

    def _open_admin(self, engine: Engine) -> Any:
        return SimulatedAdmin(engine.url)

    def _make_expectation(self, *, compares_values: bool, places: Any) -> Any:
        return _Expectation()

    def _push(self, weights: Any, version: int, admins: Sequence[SimulatedAdmin]) -> None:
        failures = {}
        for admin in admins:
            engine = self.engines[admin.url]
            if engine.answers and not engine.refuses:
                engine.version = version
            else:
                failures[admin.url] = "it does not take the weights"
        if failures:
            raise WeightUpdateFailed(version, failures, [])

    def _audit(self, admin: SimulatedAdmin, expectation: Any) -> Any:
        engine = self.engines[admin.url]
        if not engine.answers:
            raise RequestFailed(f"{admin.url} does not answer")

        def raise_on_mismatch(version: int) -> None:
            if engine.spoils:
                raise WeightMismatch(admin.url, version, ["it holds others"])
            engine.is_audited = True
            member = self.members.of_url(admin.url)
            assert member is not None
            self._audited_starts.add((member.name, member.epoch, member.num_failures))

        return SimpleNamespace(num_compared=1, raise_on_mismatch=raise_on_mismatch)

    def _probe(self, name: str, epoch: int, engine: Engine) -> None:
        problem = "" if self.engines[engine.url].answers else "it does not answer"
        self._probe_results.append(ProbeResult(name, epoch, problem))

    def _take_probe_results(self) -> list[ProbeResult]:
        results = self._probe_results
        self._probe_results = []
        return results

    def _read_reports(self, nodes: Iterable[int]) -> list[NodeReport]:
        return [self.nodes[node].report for node in nodes]

    def _order(self, node: int, orders: NodeOrders) -> None:
        self.nodes[node].orders = orders
