"""Opens the engines of a run: servers, collectors, the rollout queue and weight sync."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_rl.config.schema import (
    Configuration,
    EngineSettings,
    RecoverySettings,
    SyncSettings,
)
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.engines.engine_prober import EngineProber
from megatron_rl.engines.fleet import Fleet, managed_name
from megatron_rl.engines.members import Members
from megatron_rl.engines.node.node_board import NodeBoard
from megatron_rl.engines.node.node_keeper import NodeKeeper
from megatron_rl.engines.node.node_processes import NodeProcesses
from megatron_rl.engines.node.weight_copies import RemoteWeightCopies, WeightCopyKeeper
from megatron_rl.engines.quantization import engine_quantization
from megatron_rl.engines.rank_part import open_rank_part
from megatron_rl.engines.server_places import server_places
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.engines.url_list import UrlList
from megatron_rl.engines.weight_sync import (
    FollowerSync,
    WeightCopies,
    WeightSync,
    open_weight_sync,
)
from megatron_rl.mcore.collectives import broadcast_bytes, gather_bytes
from megatron_rl.mcore.job import Job
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.colocated import colocated_memory, require_memory
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import Configure
from sglang_bridge.addresses import node_address, require_private_address
from sglang_bridge.admin import AdminClient
from sglang_bridge.deltas.scratch import open_scratch
from sglang_bridge.deltas.weight_copy import WeightCopy
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.keys import RunKeys, create_keys, read_keys
from sglang_bridge.plugin import narrow_routes
from sglang_bridge.server.readiness import require_external_engines, require_settings
from sglang_bridge.weights.calls import call_each
from sglang_bridge.weights.part import RankPart

_HUB_SECONDS = 60.0
_ABORT_SECONDS = 5.0
_KILL_SECONDS = 2.5
_COUNT_SECONDS = 5.0
_PROBE_SECONDS = 10.0

WeightSyncOpener = Callable[[Members, Callable[[str], None]], WeightSync]
RankPartOpener = Callable[[Callable[[str], None]], RankPart]


class Engines:
    """The engines of a run as one rank sees them. `open_engines` makes it.

    processes: the processes of this node, None on ranks that own none. template: the configuration
    of every collector, without its engines. open_sync: opens weight sync to the members of the run,
    with a function that logs. open_part: opens another rank's part in it. stack: closes the
    connections. quantization: of every engine, as a `quantization_config`; None for unquantized
    ones.
    """

    def __init__(
        self,
        job: Job,
        keys: RunKeys,
        processes: NodeProcesses | None,
        template: Configure,
        recovery: RecoverySettings,
        open_sync: WeightSyncOpener,
        open_part: RankPartOpener,
        stack: contextlib.ExitStack,
        quantization: Mapping[str, Any] | None = None,
    ) -> None:
        self._job = job
        self._keys = keys
        self._processes = processes
        self._template = template
        self._settings = template.engine
        self._recovery = recovery
        self._open_sync = open_sync
        self._open_part = open_part
        self._stack = stack
        self._quantization = quantization
        self._keeper: NodeKeeper | None = None

    def open_follower(self, log: Callable[[str], None]) -> FollowerSync:
        """Open this rank's side of weight syncs, which rank 0 leads.

        log: writes a line about a long wait.
        """
        follower = FollowerSync(self._open_part(log))
        self._stack.callback(follower.close)
        return follower

    def connect(
        self, log: Callable[[str], None] | None = None, *, sends_weights: bool = True
    ) -> EngineConnections | None:
        """Wait until every engine answers, and connect rank 0 to all of them (a collective).

        log: writes a line about an engine for people. sends_weights: False where engines serve the
        weights that they have loaded themselves. Returns None on the other ranks.
        """
        log = log or _write_nothing
        urls = self._open_url_list(log)
        node_engines = self._wait_for_node_engines(self._share_urls(urls))
        engines = self._gather_engines(node_engines)
        hub = self._open_hub(start_collector=bool(node_engines))
        board = NodeBoard(self._job.store())
        self._keep_processes(board, log)
        if hub is None:
            return None
        nodes = sorted({engine.node for engine in engines})
        hub.wait_for(len(nodes), _HUB_SECONDS)
        queue = RolloutQueue(hub, self._template.rollout, abort=self._abort_request, log=log)
        queue.configure(dict.fromkeys(nodes, self._template))
        members = self._open_members(engines)
        admins = [self._open_admin(engine) for engine in engines]
        if self._template.routes is not None:
            name_wide_routes(admins, log)
        weights = self._open_sync(members, log)
        self._stack.callback(weights.close)
        token_counter = TokenCounter(admins, log)
        fleet = Fleet(
            members,
            queue,
            EngineProber(self._require_usable),
            self._recovery,
            board=board,
            nodes=nodes,
            log=log,
            urls=urls,
            token_counter=token_counter,
            open_counter=self._open_admin,
        )
        queue.on_engine_failure = fleet.handle_engine_failure
        queue.on_lost_collector = fleet.handle_lost_collector
        return EngineConnections(
            queue, weights, fleet, self._open_admin, token_counter, sends_weights
        )

    @property
    def description(self) -> str:
        """Describes how this node gets its engines, for progress lines."""
        if self._settings.mode == "external":
            return f"connecting to {name_external_engines(self._settings)}"
        nodes = self._settings.nodes_per_engine
        place = "a node" if nodes == 1 else f"on every {nodes} nodes together"
        return f"starting {self._settings.count} engine(s) {place}"

    def check(self) -> None:
        """Raise an error if nobody looks after the processes of this node any more."""
        if self._keeper is not None:
            self._keeper.check()

    def kill_processes(self) -> None:
        """End the processes of this node quickly: nothing that they hold is needed any more."""
        if self._processes is not None:
            self._processes.stop(_KILL_SECONDS)

    def _keep_processes(self, board: NodeBoard, log: Callable[[str], None]) -> None:
        """Look after the processes of this node from now on."""
        if self._processes is None:
            return
        self._keeper = NodeKeeper(self._processes, board, log=log)
        self._stack.callback(self._keeper.close)

    def _open_members(self, engines: Sequence[Engine]) -> Members:
        """Return the engines of the run, which answer and wait for weights."""
        members = Members()
        counts = Counter[int]()  # engines by node
        for engine in engines:
            name = engine.url
            if self._settings.mode == "managed":
                name = managed_name(engine.node, counts[engine.node])
            counts[engine.node] += 1
            members.add(name, engine)
            members.answer(name, 0)
        return members

    def _require_usable(self, engine: Engine) -> Engine:
        """Return an engine that wants to join, with the sizes with which it runs.

        Raises `EngineError` if it does not answer or does not fit.
        """
        admin = AdminClient(engine, self._keys, timeout=_PROBE_SECONDS)
        if not admin.is_ready():
            raise RequestFailed(f"{engine.url} does not answer")
        if self._settings.mode == "managed":
            return engine
        return require_settings(
            engine,
            admin.server_info(),
            self._settings.dtype,
            return_routes=self._template.routes is not None,
            model_path=self._template.model_path,
            quantization=self._quantization,
        )

    def _open_admin(self, engine: Engine) -> AdminClient:
        return AdminClient(engine, self._keys, timeout=_COUNT_SECONDS)

    def _open_url_list(self, log: Callable[[str], None]) -> UrlList | None:
        if self._settings.urls_file is None or self._job.rank:
            return None
        return UrlList(self._settings, log)

    def _share_urls(self, urls: UrlList | None) -> list[str]:
        """Return the URLs of the external engines at the start (a collective).

        Rank 0 reads the file for all: it may change meanwhile. Raises `Failure` on rank 0.
        """
        if self._settings.urls_file is None:
            return self._settings.url_list
        message = None if urls is None else msgspec.msgpack.encode(urls.read_first())
        data = broadcast_bytes(message, self._job.control_group)
        return msgspec.msgpack.decode(data, type=list[str])

    def _wait_for_node_engines(self, urls: Sequence[str]) -> list[Engine]:
        """The engines of this node, once they answer. Empty on ranks that own none.

        urls: of the external engines of all nodes.
        """
        settings = self._settings
        job = self._job
        if self._processes is None:
            return []
        if settings.mode == "managed":
            return self._processes.wait_healthy(settings.start_timeout_s)
        engines = []
        for url in urls[job.node :: job.num_nodes]:
            engine = Engine(
                url=url,
                node=job.node,
                tp=settings.tp,
                ep=settings.ep,
                quantization=settings.quantization,
            )
            engines.append(engine)
        return_routes = self._template.routes is not None
        return require_external_engines(
            engines,
            self._keys,
            settings,
            return_routes=return_routes,
            model_path=self._template.model_path,
            quantization=self._quantization,
        )

    def _gather_engines(self, node_engines: Sequence[Engine]) -> list[Engine]:
        """The engines of all nodes (a collective)."""
        engines: list[Engine] = []
        data = msgspec.msgpack.encode(node_engines)
        for part in gather_bytes(data, self._job.control_group):
            engines += msgspec.msgpack.decode(part, type=list[Engine])
        return engines

    def _open_hub(self, *, start_collector: bool) -> CollectorHub | None:
        """Open the hub on rank 0, and start a collector on every node with engines (a collective).

        Returns None on the other ranks.
        """
        hub = None
        message = None
        if self._job.rank == 0:
            host = node_address(self._job.num_nodes)
            require_private_address(host)
            hub = CollectorHub(host)
            self._stack.callback(hub.close)
            message = msgspec.msgpack.encode((hub.address, hub.run_key))
        address, run_key = msgspec.msgpack.decode(
            broadcast_bytes(message, self._job.control_group), type=tuple[tuple[str, int], str]
        )
        if self._processes is not None and start_collector:
            self._processes.start_collector(address, run_key)
        return hub

    def _abort_request(self, url: str, name: str) -> None:
        """Abort one request. Collectors do not hold the key for this."""
        AdminClient(Engine(url=url), self._keys, timeout=_ABORT_SECONDS).abort(name)


def name_wide_routes(engines: Sequence[AdminClient], log: Callable[[str], None]) -> None:
    """Write which engines send four bytes for each expert of a route, and what that costs.

    Engines that do not answer are left out: other parts of the run notice them.
    """
    wide_urls = list[str]()

    def ask(engine: AdminClient) -> None:
        if not engine.narrows_routes():
            wide_urls.append(engine.url)

    call_each(engines, ask, deadline=time.monotonic() + _COUNT_SECONDS)
    wide = sorted(wide_urls)
    if wide:
        log(
            f"{', '.join(wide)}: the plugin narrow_routes does not run there, so that routes take "
            "four times the bytes; install this package beside SGLang and start the server with "
            f"{narrow_routes.VARIABLE}=1"
        )


def name_external_engines(settings: EngineSettings) -> str:
    """Return the URLs of external engines, or the file that lists them, for people."""
    if settings.urls_file is not None:
        return f"the engines in {settings.urls_file}"
    return ", ".join(settings.url_list)


def _write_nothing(text: str) -> None:
    """Drop a line for people: there is nowhere to write it."""


@contextlib.contextmanager
def open_engines(
    configuration: Configuration, shape: ModelShape, job: Job, directory: RunDirectory
) -> Iterator[Engines]:
    """Start the servers of this node; `Engines.connect` waits for them (a collective).

    All processes and connections end with this context.
    """
    keys = _share_keys(configuration.engine, job)
    template = collector_template(configuration, shape, keys)
    quantization = engine_quantization(configuration.engine, shape)
    with contextlib.ExitStack() as stack:
        processes = _open_processes(configuration, job, directory, stack)
        if processes is not None and configuration.engine.mode == "managed":
            places = server_places(
                configuration.engine,
                configuration.model,
                job,
                seed=configuration.seed,
                return_routes=template.routes is not None,
                quantization=quantization,
                memory_fraction=_memory_fraction(configuration, shape, job),
            )
            processes.start_engines(configuration.engine, places, keys)
            if configuration.sync.transport == "delta":
                _keep_weight_copy(job, stack)

        def open_sync(members: Members, log: Callable[[str], None]) -> WeightSync:
            copies = _weight_copies(configuration.sync, members, job, stack, log)
            return open_weight_sync(
                members,
                keys,
                configuration.sync,
                configuration.engine,
                shape,
                directory=directory.path / "sync",
                model_path=Path(configuration.model.path),
                job=job,
                log=log,
                copies=copies,
            )

        yield Engines(
            job,
            keys,
            processes,
            template,
            configuration.recovery,
            open_sync,
            partial(_open_part, configuration, keys, job, directory),
            stack,
            quantization,
        )


def _memory_fraction(c: Configuration, shape: ModelShape, job: Job) -> float | None:
    """Return the share of its GPUs that an engine may use beside the trainer.

    None where they share no GPU. Raises `Failure`.
    """
    device_bytes = _gpu_bytes(job)
    if not c.engine.colocated or device_bytes is None:
        return None
    return require_memory(
        colocated_memory(c, shape, world_size=job.world_size, device_bytes=device_bytes)
    )


def _gpu_bytes(job: Job) -> int | None:
    """The memory of this rank's GPU, None without one."""
    if job.device.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(job.device).total_memory)


def _open_processes(
    configuration: Configuration, job: Job, directory: RunDirectory, stack: contextlib.ExitStack
) -> NodeProcesses | None:
    """Open the processes of this node on its first rank."""
    if job.local_rank:
        return None
    shares_engines = configuration.engine.nodes_per_engine > 1
    processes = NodeProcesses(
        node=job.node,
        log_directory=directory.logs,
        recovery=configuration.recovery,
        # It would take memory while the trainer has the device
        restarts_engines=not configuration.engine.colocated,
        board=NodeBoard(job.store()) if shares_engines else None,
    )
    stack.callback(processes.stop)
    return processes


def _open_part(
    configuration: Configuration,
    keys: RunKeys,
    job: Job,
    directory: RunDirectory,
    log: Callable[[str], None],
) -> RankPart:
    """Open this rank's part in weight syncs."""
    return open_rank_part(
        job,
        keys,
        configuration.sync,
        configuration.engine,
        directory=directory.path / "sync",
        model_path=Path(configuration.model.path),
        log=log,
    )


def _keep_weight_copy(job: Job, stack: contextlib.ExitStack) -> None:
    """Keep a copy of the weights on this node, which follows the orders of rank 0."""
    scratch = stack.enter_context(open_scratch())
    keeper = WeightCopyKeeper(job.node, WeightCopy(scratch), NodeBoard(job.store()))
    stack.callback(keeper.close)


def _weight_copies(
    settings: SyncSettings,
    members: Members,
    job: Job,
    stack: contextlib.ExitStack,
    log: Callable[[str], None],
) -> WeightCopies | None:
    """Return the copies of the weights on all nodes, None without sync.transport=delta."""
    if settings.transport != "delta":
        return None
    on_nodes = RemoteWeightCopies(
        sorted({member.engine.node for member in members}),
        NodeBoard(job.store()),
        timeout_seconds=settings.timeout_s,
        log=log,
    )
    return WeightCopies(on_nodes, stack.enter_context(open_scratch()))


def collector_template(configuration: Configuration, shape: ModelShape, keys: RunKeys) -> Configure:
    """The configuration of every collector, without its engines.

    Routes are requested only for train.replay=rollout.
    """
    records_routes = configuration.train.replay == "rollout"
    return Configure(
        api_key=keys.api_key,
        model_path=configuration.model.path,
        routes=shape.route_shape if records_routes else None,
        engine=configuration.engine,
        rollout=configuration.rollout,
        reward=configuration.reward,
        environment=configuration.environment,
        credit=configuration.credit,
        vocab_size=shape.vocab_size,
        seed=configuration.seed,
        open_timeout_s=configuration.parallel.timeout_s,
    )


def _share_keys(engine: EngineSettings, job: Job) -> RunKeys:
    """The engine keys of the run, the same on every rank (a collective).

    They are random, or external engines have them in engine.key_file.
    """
    message = None
    if job.rank == 0:
        keys = create_keys() if engine.key_file is None else read_keys(Path(engine.key_file))
        message = msgspec.msgpack.encode(keys)
    return msgspec.msgpack.decode(broadcast_bytes(message, job.control_group), type=RunKeys)
