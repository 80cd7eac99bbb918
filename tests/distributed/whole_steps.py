"""Script for torchrun: whole steps of a real `Worker` in several layouts, one after the other.

Usage: whole_steps.py DIRECTORY CASE...; a case is LAYOUT:ALGORITHM:MODEL of `support.layouts`.
DIRECTORY holds a checkpoint for each model, with its `rollouts`. Rank 0 writes the results of each
case to `DIRECTORY/CASE.pt`.
"""

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.schema import (
    EngineSettings,
    ModelSettings,
    TrainSettings,
)
from megatron_rl.contracts.group import RolloutLocation
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.assign import Credit
from megatron_rl.mcore import parallel
from megatron_rl.mcore.collectives import broadcast_bytes
from megatron_rl.mcore.optimizer import DistributedAdam, StepResult
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.rollouts.wire.store import RolloutStore
from megatron_rl.training.batch_recording import BatchRecorder
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from megatron_rl.training.worker import Worker, gather_receivers
from tests.support.judged_batches import judged_groups
from tests.support.layouts import (
    BATCH,
    BATCHES,
    CREDIT,
    LAYOUTS,
    OPTIMIZER,
    STEPS_PER_BATCH,
    TEMPERATURE,
    TOTAL_STEPS,
    LayoutCase,
    algorithm_settings,
)
from tests.support.policies import make_batcher, make_planner, make_policy, make_view
from tests.support.recordings import read_rollouts
from tests.support.router_calls import RouterCalls


class RecordingBatcher(Batcher):
    """Keeps the micro-batches of the last step."""

    last_steps: list[list[MicroBatch]]

    def optimizer_steps(self, *args: Any) -> list[list[MicroBatch]]:
        self.last_steps = super().optimizer_steps(*args)
        return self.last_steps


class RecordingAdam(DistributedAdam):
    """Keeps the result of every step and the gradients of the routers."""

    def __init__(self, models: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(models, *args, **kwargs)
        self.results: list[StepResult] = []
        self.routers = RouterCalls(models)
        self.router_gradients: list[float] = []

    def step(self, *, loss_is_finite: bool, max_norm: float | None = None) -> StepResult:
        self.router_gradients += self.routers.gradients()
        self.results.append(super().step(loss_is_finite=loss_is_finite, max_norm=max_norm))
        return self.results[-1]


def build(
    case: LayoutCase, layout: RankLayout, directory: Path
) -> tuple[Worker, RecordingAdam, RecordingBatcher]:
    case_layout = LAYOUTS[case.layout]
    grid = case_layout.parallel
    checkpoint = directory / case.model
    shape, policy = make_policy(
        checkpoint,
        grid,
        algorithm_settings(case, directory),
        recompute=case_layout.recompute,
        dtype=case_layout.dtype,
        temperature=TEMPERATURE,
        **layout.groups,
    )
    adam = RecordingAdam(policy.models, OPTIMIZER, total_steps=TOTAL_STEPS)
    batcher = make_batcher(shape, grid, layout, RecordingBatcher)
    assert isinstance(batcher, RecordingBatcher)
    moe_rows = make_view(shape, grid, layout).moe_rows(shape.moe_layers)
    receivers = gather_receivers(layout, moe_rows)
    worker = Worker(
        layout=layout,
        receivers=receivers,
        shape=shape,
        policy=policy,
        optimizer=adam,
        batcher=batcher,
        model=ModelSettings(path=str(checkpoint)),
        engine=EngineSettings(dtype="float32"),
        # The routes are random, so that all of them differ from the routers' choices
        settings=TrainSettings(total_steps=1, max_route_disagreement=1),
        recorder=BatchRecorder(directory, 0, receivers, layout.rank, layout.control_group),
    )
    return worker, adam, batcher


def store_on_rank_0(
    layout: RankLayout, store: RolloutStore, rollouts: Sequence[Rollout], batch: int
) -> list[RolloutLocation]:
    """Store rollouts in rank 0's memory and return their locations on all ranks."""
    data = msgspec.msgpack.encode(store.put(str(batch), rollouts)) if layout.rank == 0 else None
    return msgspec.msgpack.decode(
        broadcast_bytes(data, layout.control_group), type=list[RolloutLocation]
    )


def ids_by_step(plan: StepPlan) -> list[list[str]]:
    """Return the ids of the rollouts of each optimizer step."""
    ids = [ref.rollout_id for ref in plan.rollouts]
    indices_by_step = [
        [index for rank_batches in step.micro_batches for batch in rank_batches for index in batch]
        for step in plan.optimizer_steps
    ]
    return [sorted(ids[index] for index in indices) for indices in indices_by_step]


def advantages_by_id(plan: StepPlan) -> dict[str, tuple[float, float]]:
    """Return the (advantage, entropy advantage) of each rollout."""
    pairs = zip(plan.advantages, plan.entropy_advantages, strict=True)
    return {ref.rollout_id: pair for ref, pair in zip(plan.rollouts, pairs, strict=True)}


def plan_batches(
    case: LayoutCase, layout: RankLayout, directory: Path, store: RolloutStore
) -> Iterator[StepPlan]:
    """Plan the batches one after the other. The rollouts are stored in rank 0's memory."""
    credit = Credit(algorithm_settings(case, directory), CREDIT)
    planner = make_planner(
        LAYOUTS[case.layout].parallel,
        layout,
        optimizer_steps_per_batch=STEPS_PER_BATCH,
        tokens_per_micro_batch=80 if layout.dp_size == 1 else 40,
    )
    all_rollouts = read_rollouts(directory / case.model / "rollouts")
    for batch in range(BATCHES):
        rollouts = all_rollouts[batch * BATCH : (batch + 1) * BATCH]
        locations = store_on_rank_0(layout, store, rollouts, batch)
        batch_credit = credit.assign(judged_groups(rollouts, locations))
        yield planner.plan(
            batch,
            batch_credit.rollouts,
            batch_credit.advantages,
            batch_credit.extra_rollouts,
            weights=batch_credit.weights,
        )


def train(
    case: LayoutCase, layout: RankLayout, directory: Path, worker: Worker, batcher: RecordingBatcher
) -> tuple[list[dict[str, Any]], int]:
    """Train all batches. Returns the results of each, and the number of router calls."""
    adam = worker.optimizer
    assert isinstance(adam, RecordingAdam)
    with_recomputation = LAYOUTS[case.layout].recompute == "full"
    # Several micro-batches are in flight in a pipeline
    min_batches = 3 if LAYOUTS[case.layout].parallel.pp > 1 else 2
    num_calls = 0
    results = []
    for plan in plan_batches(case, layout, directory, RolloutStore(node=0)):
        assert all(len(step.micro_batches[0]) >= min_batches for step in plan.optimizer_steps)
        outcome = worker.train(plan)
        assert outcome.finite and outcome.optimizer_steps == STEPS_PER_BATCH
        num_calls += adam.routers.check(
            batcher.last_steps,
            with_recomputation=with_recomputation,
            forward_passes=1 if worker.policy.reference is None else 2,
        )
        result = {
            "steps": ids_by_step(plan),
            "advantages": advantages_by_id(plan),
            "metrics": outcome.metrics.values(),
        }
        results.append(result)
    return results, num_calls


def run_case(case: LayoutCase, layout: RankLayout, directory: Path) -> None:
    worker, adam, batcher = build(case, layout, directory)
    batches, num_calls = train(case, layout, directory, worker, batcher)
    weights = {name: tensor.clone() for name, tensor in worker.export().stream_all()}
    routers: list[Any] = [None] * layout.world_size
    dist.all_gather_object(routers, (num_calls, min(adam.router_gradients, default=None)))
    if layout.rank == 0:
        result = {
            "batches": batches,
            "weights": weights,
            "routers": routers,
            "grad_norms": [step.grad_norm for step in adam.results],
            "rates": [step.lr for step in adam.results],
        }
        torch.save(result, directory / f"{case}.pt")
    dist.barrier()


def main() -> None:
    directory = Path(sys.argv[1])
    cases = [LayoutCase.parse(name) for name in sys.argv[2:]]
    for settings, same_grid in itertools.groupby(cases, lambda case: LAYOUTS[case.layout].parallel):
        layout = parallel.initialize(settings, seed=0)
        for case in same_grid:
            run_case(case, layout, directory)
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


if __name__ == "__main__":
    main()
