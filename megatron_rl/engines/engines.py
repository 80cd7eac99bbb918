"""One way to open engines: servers, collectors, the rollout queue and weight sync, ended together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from megatron_rl.config.schema import Configuration
from megatron_rl.engines.node_processes import NodeProcesses
from megatron_rl.engines.open_weight_sync import open_weight_sync
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.mcore.job import Job
from megatron_rl.models.route_shape import route_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.rollouts.hub import Hub
from megatron_rl.rollouts.messages import Configure
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.training.collectives import broadcast_bytes, gather_bytes
from sglang_bridge.addresses import node_address, require_private_address
from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import RunKeys, create_keys, read_keys
from sglang_bridge.server.readiness import require_external_engines
from sglang_bridge.settings import ServerPlace, device_of

_HUB_SECONDS = 60.0
_ABORT_SECONDS = 5.0
_ABANDON_SECONDS = 2.5


@dataclass(frozen=True)
class EngineConnections:
    """Rank 0's hold on the engines: where rollouts are asked for, and where weights are sent."""

    queue: RolloutQueue
    weights: WeightSync


class Engines:
    """The engines of a run as one rank sees them. Open them with `open_engines`."""

    def __init__(
        self,
        configuration: Configuration,
        shape: ModelShape,
        job: Job,
        directory: RunDirectory,
        stack: contextlib.ExitStack,
    ) -> None:
        self._configuration = configuration
        self._shape = shape
        self._job = job
        self._directory = directory
        self._stack = stack
        self._record_routes = configuration.train.replay == "rollout"
        self._keys = self._share_keys()
        self._services: NodeProcesses | None = None
        if job.local_rank == 0:
            self._services = NodeProcesses(node=job.node, log_directory=directory.logs)
            stack.callback(self._services.stop)
            if configuration.engine.mode == "managed":
                self._services.start_engines(configuration.engine, self._places(), self._keys)

    def connect(self, say: Callable[[str], None] | None = None) -> EngineConnections | None:
        """Wait until every engine answers and connect rank 0 to all (a collective); None on the
        other ranks.

        say: tells a person what happens to engines later.
        """
        own = self._own_engines()
        gathered = gather_bytes(msgspec.msgpack.encode(own), self._job.control_group)
        engines = [e for data in gathered for e in msgspec.msgpack.decode(data, type=list[Engine])]
        hub = self._open_hub(start_collector=bool(own))
        if hub is None:
            return None
        configuration = self._configuration
        hub.wait_for(len({engine.node for engine in engines}), _HUB_SECONDS)
        queue = RolloutQueue(hub, configuration.rollout, abort=self._abort_request, say=say)
        queue.configure(
            {node: self._configure(engines, node) for node in {engine.node for engine in engines}}
        )
        weights = open_weight_sync(
            engines,
            self._keys,
            configuration.sync,
            configuration.engine,
            self._shape,
            directory=self._directory.path / "sync",
            model_path=Path(configuration.model.path),
            device=self._job.device,
        )
        self._stack.callback(weights.close)
        return EngineConnections(queue, weights)

    @property
    def starting(self) -> str:
        """What this node waits for, for people."""
        settings = self._configuration.engine
        if settings.mode == "external":
            return f"connecting to {', '.join(settings.urls)}"
        return f"starting {settings.count} engine(s) a node"

    def check(self) -> None:
        """Raise an error if an engine or the collector of this node ended, or was stopped."""
        if self._services is not None:
            self._services.check()

    def abandon(self) -> None:
        """End this node's processes now; nothing that they hold is needed any more."""
        if self._services is not None:
            self._services.stop(_ABANDON_SECONDS)

    def _share_keys(self) -> RunKeys:
        """The run's engine keys, the same on every rank: random, or the external engines' own (a
        collective).
        """
        data = None
        if self._job.rank == 0:
            file = self._configuration.engine.key_file
            data = msgspec.msgpack.encode(
                read_keys(Path(file)) if file is not None else create_keys()
            )
        return msgspec.msgpack.decode(broadcast_bytes(data, self._job.control_group), type=RunKeys)

    def _places(self) -> list[ServerPlace]:
        """One place per managed engine of this node; with GPUs each gets `tp` devices of its own
        behind the ranks'.
        """
        engine, model, job = self._configuration.engine, self._configuration.model, self._job
        device = device_of(engine, torch.cuda.device_count())
        starts = [job.local_world_size + index * engine.tp for index in range(engine.count)]
        return [
            ServerPlace(
                model_path=model.path,
                device=device,
                node=job.node,
                host=node_address(job.num_nodes),
                gpus=tuple(range(start, start + engine.tp)) if device == "cuda" else (),
                return_routes=self._record_routes,
                load_format="dummy" if model.init == "random" else None,
                seed=(self._configuration.seed + job.node * engine.count + index) % 2**32,
            )
            for index, start in enumerate(starts)
        ]

    def _own_engines(self) -> list[Engine]:
        """This node's engines, once they answer; none where another rank of the node has them."""
        settings, job = self._configuration.engine, self._job
        if self._services is None:
            return []
        if settings.mode == "managed":
            return self._services.wait_healthy(settings.start_timeout_s)
        engines = [
            Engine(
                url=url,
                node=job.node,
                tp=settings.tp,
                ep=settings.ep,
                quantization=settings.quantization,
            )
            for url in settings.urls[job.node :: job.num_nodes]
        ]
        require_external_engines(engines, self._keys, settings, return_routes=self._record_routes)
        return engines

    def _open_hub(self, *, start_collector: bool) -> Hub | None:
        """Rank 0 listens; every node with engines starts its collector (a collective)."""
        hub, mine = None, None
        if self._job.rank == 0:
            host = node_address(self._job.num_nodes)
            require_private_address(host)
            hub = Hub(host)
            self._stack.callback(hub.close)
            mine = msgspec.msgpack.encode((hub.address, hub.run_key))
        address, key = msgspec.msgpack.decode(
            broadcast_bytes(mine, self._job.control_group), type=tuple[tuple[str, int], str]
        )
        if self._services is not None and start_collector:
            self._services.start_collector(address, key)
        return hub

    def _configure(self, engines: list[Engine], node: int) -> Configure:
        configuration = self._configuration
        return Configure(
            engines=tuple(engine for engine in engines if engine.node == node),
            api_key=self._keys.api_key,
            model_path=configuration.model.path,
            routes=route_shape(self._shape) if self._record_routes else None,
            engine=configuration.engine,
            rollout=configuration.rollout,
            reward=configuration.reward,
            environment=configuration.environment,
            credit=configuration.credit,
            vocab_size=self._shape.vocab_size,
            seed=configuration.seed,
        )

    def _abort_request(self, url: str, rid: str) -> None:
        """End one request; collectors do not hold the key for it."""
        AdminClient(Engine(url=url), self._keys, timeout=_ABORT_SECONDS).abort(rid)


@contextlib.contextmanager
def open_engines(
    configuration: Configuration, shape: ModelShape, job: Job, directory: RunDirectory
) -> Iterator[Engines]:
    """Start this node's servers, which load meanwhile; `connect` waits for them. All end with the
    block.

    A collective: every rank of the run enters it.
    """
    with contextlib.ExitStack() as stack:
        yield Engines(configuration, shape, job, directory, stack)
