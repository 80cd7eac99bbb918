"""Builds one rank of a cluster without data, and runs one training step of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launch.rehearsal.collective_log import Collective
from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.device_mode import DeviceMode
from launch.rehearsal.gpus import Gpu
from launch.rehearsal.order.recorder import Recorder
from launch.rehearsal.synthetic_batches import Routing, make_rollout, make_routes
from launch.rehearsal.torch_stand_ins import (
    DEVICE,
    join_as,
    stand_in_for_cuda,
    stand_in_for_random_states,
    stand_in_for_tensor_methods,
    without_triton_launches,
)
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import open_loss
from megatron_rl.mcore import compat
from megatron_rl.mcore.job import Job
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.rank_view import RankView

SETUP = "setup"
OLD_POLICY = "old policy"
UPDATE = "update"
EXPORT = "export"
SAVE = "save"


@dataclass(frozen=True)
class Place:
    """The rank to rehearse. gpus_per_node: the ranks of one node."""

    rank: int
    world_size: int
    gpus_per_node: int
    gpu: Gpu


@dataclass(frozen=True)
class Workload:
    """The micro-batches that the rank trains on.

    micro_batches: of one optimizer step; None is what fills the pipeline, and at most what the
    settings give. routing: how the tokens choose their experts.
    """

    micro_batches: int | None = None
    routing: Routing = "balanced"


@dataclass(frozen=True)
class RankReport:
    """The result of a rehearsal. All numbers are of one optimizer step.

    tokens: rows of a micro-batch on this rank. memory: bytes by phase and kind, at the phase's
    peak. flops, seconds: by phase; see `DeviceMode`. host_reads: by place, in all phases.
    launches: Triton kernels that were launched.
    """

    place: Place
    pipeline_stage: int
    parameters: int
    micro_batches: int
    tokens: int
    memory: dict[str, dict[str, int]]
    flops: dict[str, int]
    seconds: dict[str, float]
    collectives: list[Collective]
    host_reads: dict[str, int]
    launches: list[str] = field(default_factory=list)

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind in the phase that needs most."""
        return max(self.memory.values(), key=lambda kinds: sum(kinds.values()))

    @property
    def fits(self) -> bool:
        """True if the peak is within the memory of the GPU."""
        return sum(self.peak.values()) <= self.place.gpu.memory


_running_modes: list[DeviceMode] = []


def current_phase() -> str:
    """The part of the step that this process rehearses."""
    return (_running_modes and _running_modes[-1].phase) or "importing Megatron"


def rehearse_rank(c: Configuration, place: Place, workload: Workload) -> RankReport:
    """Build the rank of the configured model and run one step.

    `load_cuda_guard` must have been called before torch was imported. Raises
    `RehearsalUnavailable` for a part that cannot be rehearsed.
    """
    shape = read_shape(c.model.path)
    with stand_in(place) as (mode, launches):
        report = RankStep(c, shape, place, mode).run(workload)
    report.launches.extend(launches)
    return report


@contextlib.contextmanager
def stand_in(
    place: Place, recorder: Recorder | None = None
) -> Iterator[tuple[DeviceMode, list[str]]]:
    """Let this process be one rank of a cluster. Yields its device and the launches of kernels.

    recorder: records the order of collectives. Raises `RehearsalUnavailable` for an operation
    whose shapes torch cannot tell.
    """
    mode = DeviceMode(place.gpu)
    mode.log.recorder = recorder
    _running_modes.append(mode)
    stand_in_for_cuda(place.gpu, place.gpus_per_node)
    compat.install()
    stand_in_for_random_states()
    stand_in_for_tensor_methods(mode)
    join_as(place.rank, place.world_size, recorder)
    with without_triton_launches() as launches, mode.fake_mode, mode:
        try:
            yield mode, launches
        except NotImplementedError as error:
            raise RehearsalUnavailable(f"torch has no shapes for an operation: {error}") from error


class RankStep:
    """One rank, from its groups to a saved checkpoint."""

    def __init__(self, c: Configuration, shape: ModelShape, place: Place, mode: DeviceMode) -> None:
        from megatron_rl.mcore import parallel  # imports Megatron, which needs the stand-ins
        from megatron_rl.run.build_worker import build_worker

        self._c = c
        self._shape = shape
        self._place = place
        self._mode = mode
        self._memory: dict[str, dict[str, int]] = {}
        mode.set_phase(SETUP)
        self._layout = parallel.initialize(c.parallel, seed=c.seed, job=job_of(place))
        loss = open_loss(c.algo, shape)
        self._worker = build_worker(c, shape, loss, self._layout, Path("rollouts"))
        self._label_model()

    def run(self, workload: Workload) -> RankReport:
        """Run a step, an export, and a save if the run saves checkpoints."""
        from megatron_rl.mcore.checkpoint import gather_tensors

        worker = self._worker
        mode = self._mode
        micro_batches = self._count_micro_batches(workload.micro_batches)
        with mode.meter.kind("routes and inputs"):
            batches = [self._pack(workload.routing) for _ in range(micro_batches)]
        rows = batches[0].inputs.num_tokens
        # Stages exchange [rows, 1, hidden], split over tensor-parallel ranks
        mode.log.message_shape = (rows // self._c.parallel.tp, 1, self._shape.hidden_size)
        self._train(batches)
        del batches
        self._begin(EXPORT)
        for _ in worker.export().stream_owned():
            pass  # its buckets are not rehearsed
        if self._c.run.checkpoint_every:
            self._begin(SAVE)
            gather_tensors(worker.policy.models, worker.optimizer, check_places=False)
        self._begin("end")
        return RankReport(
            place=self._place,
            pipeline_stage=self._layout.pp_rank,
            parameters=sum(p.numel() for m in worker.policy.models for p in m.parameters()),
            micro_batches=micro_batches,
            tokens=rows,
            memory=self._memory,
            flops=dict(mode.flops),
            seconds=dict(mode.seconds),
            collectives=mode.log.entries,
            host_reads=dict(mode.host_reads),
        )

    def _train(self, batches: list[Any]) -> None:
        """Run the old-policy pass and one optimizer step."""
        from megatron_rl.training.metric_sums import MetricSums
        from megatron_rl.training.old_policy import compute_old_policy
        from megatron_rl.training.update import update_policy

        policy = self._worker.policy
        self._begin(OLD_POLICY)
        objectives = compute_old_policy(policy, batches, MetricSums())
        self._begin(UPDATE)
        result = update_policy(
            policy,
            self._worker.optimizer,
            batches,
            objectives,
            Denominators(sequences=1.0, tokens=1.0),
            dp_size=self._layout.dp_size,
            first_step=True,
            metrics=MetricSums(),
        )
        if not result.is_applied:
            raise RehearsalUnavailable("the update was not applied: routes were not replayed")

    def _begin(self, phase: str) -> None:
        """Keep the peak of the phase that ends, and begin another."""
        meter = self._mode.meter
        self._memory[self._mode.phase] = dict(meter.peak)
        meter.start_peak()
        self._mode.set_phase(phase)

    def _label_model(self) -> None:
        """Tell weights, gradients and the optimizer's state apart."""
        meter = self._mode.meter
        self._worker.optimizer.initialize_moments()
        meter.relabel_all("optimizer")
        models: Sequence[Any] = self._worker.policy.models
        for model in models:
            meter.relabel(model.parameters(), "weights")
            meter.relabel(model.module.buffers(), "weights")
            buffers = (*model.buffers, *model.expert_parallel_buffers)
            meter.relabel([buffer.grad_data for buffer in buffers], "gradients")

    def _count_micro_batches(self, number: int | None) -> int:
        c = self._c
        rollouts = c.rollout.prompts_per_step * c.rollout.samples_per_prompt
        of_rank = rollouts / (self._layout.dp_size * c.train.optimizer_steps_per_batch)
        available = max(1, round(of_rank / len(self._lengths())))
        if number is not None:
            return number
        fills_pipeline = c.parallel.pp * (c.parallel.vpp or 1) + 1 if c.parallel.pp > 1 else 2
        return min(available, fills_pipeline) if c.parallel.pp == 1 else fills_pipeline

    def _longest(self) -> int:
        return self._c.data.max_prompt_tokens + self._c.rollout.max_new_tokens

    def _pack(self, routing: Routing) -> Any:
        generator = np.random.default_rng(self._place.rank)
        view = RankView.for_rank(self._shape.num_layers, self._c.parallel, **self._layout.ranks)
        layers = len(view.moe_rows(self._shape.moe_layers))
        rollouts = []
        for index, length in enumerate(self._lengths()):
            routes = make_routes(length - 1, layers, self._shape, routing, generator)
            prompt = min(self._c.data.max_prompt_tokens, length - 1)
            rollouts.append(make_rollout(index, prompt, length - prompt, routes))
        return self._worker.batcher.pack(rollouts, [1.0] * len(rollouts))

    def _lengths(self) -> list[int]:
        """The tokens of the rollouts of a micro-batch, which fill its budget of inputs.

        They are as long as the settings allow, but for the last one.
        """
        longest = self._longest()
        budget = max(self._c.train.tokens_per_micro_batch, longest - 1)
        whole, rest = divmod(budget, longest - 1)
        return [longest] * whole + [rest + 1] * (rest > 0)


def job_of(place: Place) -> Job:
    """The place of the rank among all ranks."""
    control_group = dist.group.WORLD
    assert control_group is not None
    return Job(
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.rank % place.gpus_per_node,
        local_world_size=place.gpus_per_node,
        node=place.rank // place.gpus_per_node,
        num_nodes=-(-place.world_size // place.gpus_per_node),
        device=DEVICE if torch.cuda.is_available() else torch.device("cpu"),
        control_group=control_group,
    )
