"""Everything one rank holds during a run, opened in order and closed in reverse."""

from __future__ import annotations

import contextlib
import datetime
import os
import secrets
import time
from pathlib import Path

import msgspec
from omegaconf import OmegaConf

from megatron_rl.config.run_dir import resolve_run_dir
from megatron_rl.config.schema import TrainRlConfig
from megatron_rl.mcore import parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.models.qwen3_moe import ModelShape, read_shape
from megatron_rl.prompts.source import PromptSource
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.rollouts.batch import NothingCameBack
from megatron_rl.rollouts.evaluation import LostEvaluation
from megatron_rl.rollouts.hub import CollectorLost, Hub
from megatron_rl.rollouts.messages import EngineEndpoint, NodeEngines
from megatron_rl.rollouts.queue import CollectorFailed
from megatron_rl.rollouts.store import RolloutGone
from megatron_rl.run import build
from megatron_rl.run.follower import RunAborted, follow
from megatron_rl.run.loop import TrainingLoop
from megatron_rl.run.services import NodeServices
from megatron_rl.training.collectives import ControlChannel, broadcast_bytes, gather_bytes
from megatron_rl.training.worker import Worker
from sglang_bridge.addresses import node_address
from sglang_bridge.errors import EngineError
from sglang_bridge.keys import RunKeys, create_keys, read_keys
from sglang_bridge.ports import require_private_address
from sglang_bridge.readiness import require_external_engines

_HUB_SECONDS = 60.0
_DEATH_SECONDS = 3.0
_ENGINE_TROUBLE = (EngineError, NothingCameBack, LostEvaluation, CollectorLost, CollectorFailed, RolloutGone)


class Session:
    """One rank of one run."""

    def __init__(self, config: TrainRlConfig) -> None:
        self._config = config
        self._directory: RunDirectory | None = None
        self._stack = contextlib.ExitStack()
        self._services: NodeServices | None = None
        self._endpoints: tuple[EngineEndpoint, ...] = ()
        self._control: ControlChannel | None = None
        self.speaks = int(os.environ.get("RANK", "0")) == 0

    def run(self) -> None:
        """Set up, then lead or follow to the end."""
        config = self._config
        model = read_shape(config.model.path)
        layout = parallel.initialize(
            build.parallel_sizes(config), seed=config.seed, timeout_s=config.parallel.timeout_s
        )
        self._stack.callback(parallel.shutdown)
        control = self._control = ControlChannel(layout.control_group)
        directory = self._open_directory(layout)
        progress = Progress(config.train.total_steps, enabled=config.logger.progress and layout.rank == 0)
        progress.say(f"{layout.world_size} rank(s) on {layout.num_nodes} node(s); run directory {directory.path}")
        prompts = build.build_prompts(config) if layout.rank == 0 else None  # bad rows are found before engines start
        keys = self._open_keys(layout)
        if layout.local_rank == 0:
            self._start_engines(layout, directory, keys)
        worker = build.build_worker(config, model, layout, directory.rollouts)
        engines = self._gather_engines(layout, keys)
        hub = self._open_hub(layout)
        if hub is not None and prompts is not None:
            self._lead(model, worker, directory, control, hub, engines, keys, progress, prompts)
        else:
            follow(
                control,
                worker,
                export_dtype=build.torch_dtype(config.engine.dtype),
                check_services=self._check_services,
            )

    def better_reason(self, error: BaseException) -> BaseException:
        """The death of an engine explains what failed because of it, but is noticed a moment later."""
        deadline = time.monotonic() + _DEATH_SECONDS
        while isinstance(error, _ENGINE_TROUBLE) and time.monotonic() < deadline:
            try:
                self._check_services()
            except Exception as death:
                return death
            time.sleep(0.2)
        return error

    def abort(self, reason: str) -> None:
        """Rank 0: tell followers that listen; torchrun ends the others."""
        if self._control is not None:
            with contextlib.suppress(RuntimeError):
                self._control.abort(reason)

    def close(self) -> None:
        """Leave the engines' groups, end this rank's processes, leave the job."""
        self._stack.close()

    def report(self, code: int, reason: str) -> None:
        """Rank 0: leave the code and the reason in the run directory."""
        if self._directory is not None:
            self._directory.write_exit(int(code), reason)

    def _lead(
        self,
        model: ModelShape,
        worker: Worker,
        directory: RunDirectory,
        control: ControlChannel,
        hub: Hub,
        engines: list[NodeEngines],
        keys: RunKeys,
        progress: Progress,
        prompts: PromptSource,
    ) -> None:
        config = self._config
        hub.wait_for(len(engines), _HUB_SECONDS)
        weights = build.build_sync(config, model, engines, keys, directory, worker.layout.device)
        self._stack.callback(weights.close)
        tensorboard = directory.tensorboard if config.logger.tensorboard else None
        log = self._stack.enter_context(MetricsLog(directory.metrics_file, tensorboard))
        left_out = prompts.excluded
        progress.say(
            f"{len(prompts.train)} training prompts, {len(prompts.held_out)} held out; left out: {left_out.bad} bad "
            f"rows, {left_out.duplicates} duplicates, {left_out.overlapping} that are also held out"
        )
        loop = TrainingLoop(
            settings=build.loop_settings(config, model),
            prompts=prompts,
            producer=build.build_producer(config, model, engines, hub),
            control=control,
            worker=worker,
            weights=weights,
            log=log,
            progress=progress,
            check_services=self._check_services,
        )
        loop.run()
        loop.finish(directory.checkpoints / f"step-{config.train.total_steps}" if config.run.save_weights else None)
        print(f"done: metrics, logs and checkpoints are in {directory.path}", flush=True)

    def _open_directory(self, layout: RankLayout) -> RunDirectory:
        """Rank 0 names and makes it; the others learn where it is. Raises `RunDirectoryTaken` (rank 0)."""
        if layout.rank == 0:
            path = resolve_run_dir(self._config.run, datetime.datetime.now())
            try:
                self._directory = RunDirectory.create(path, OmegaConf.to_yaml(OmegaConf.structured(self._config)))
            finally:
                created = str(path) if self._directory is not None else ""
                broadcast_bytes(created.encode(), layout.control_group)
            return self._directory
        where = broadcast_bytes(None, layout.control_group).decode()
        if not where:
            raise RunAborted("rank 0 could not make the run directory")
        return RunDirectory(Path(where))

    def _open_keys(self, layout: RankLayout) -> RunKeys:
        """The run's engine keys, the same on every rank: random, or the external engines' own."""
        data = None
        if layout.rank == 0:
            file = self._config.engine.key_file
            data = msgspec.msgpack.encode(read_keys(Path(file)) if file is not None else create_keys())
        return msgspec.msgpack.decode(broadcast_bytes(data, layout.control_group), type=RunKeys)

    def _start_engines(self, layout: RankLayout, directory: RunDirectory, keys: RunKeys) -> None:
        self._services = NodeServices(node=layout.node, log_directory=directory.logs)
        self._stack.callback(self._services.stop)
        if self._config.engine.mode == "managed":
            settings = build.engine_settings(
                self._config, first_gpu=layout.local_world_size, host=node_address(layout.num_nodes)
            )
            self._services.start_engines(settings, keys)

    def _gather_engines(self, layout: RankLayout, keys: RunKeys) -> list[NodeEngines]:
        """Every node's engines, once they answer (a collective)."""
        endpoints: tuple[EngineEndpoint, ...] = ()
        if self._services is not None and self._config.engine.mode == "managed":
            endpoints = tuple(self._services.wait_healthy(self._config.engine.start_timeout_s))
        elif self._services is not None:
            external = self._config.engine.urls[layout.node :: layout.num_nodes]
            require_external_engines(
                external,
                keys,
                deadline_seconds=self._config.engine.start_timeout_s,
                return_routes=self._config.train.replay_routes,
                tp=self._config.engine.tp,
                dtype=self._config.engine.dtype,
            )
            endpoints = tuple(EngineEndpoint(url=url, api_key=keys.api_key) for url in external)
        self._endpoints = endpoints
        mine = NodeEngines(node=layout.node, endpoints=endpoints)
        gathered = [
            msgspec.msgpack.decode(data, type=NodeEngines)
            for data in gather_bytes(msgspec.msgpack.encode(mine), layout.control_group)
        ]
        return [entry for entry in gathered if entry.endpoints]

    def _open_hub(self, layout: RankLayout) -> Hub | None:
        """Rank 0 listens; every node with engines starts its collector (a collective)."""
        hub, run_key = None, secrets.token_urlsafe(32)
        if layout.rank == 0:
            host = node_address(layout.num_nodes)
            require_private_address(host)
            hub = Hub(host, run_key)
            self._stack.callback(hub.close)
        mine = msgspec.msgpack.encode((hub.address, run_key)) if hub is not None else None
        address, key = msgspec.msgpack.decode(
            broadcast_bytes(mine, layout.control_group), type=tuple[tuple[str, int], str]
        )
        if self._services is not None and self._endpoints:
            self._services.start_collector(address, key)
        return hub

    def _check_services(self) -> None:
        if self._services is not None:
            self._services.check()
