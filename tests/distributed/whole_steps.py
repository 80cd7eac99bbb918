"""Under torchrun: whole steps of a real `Worker` in several layouts, one after the other; rank 0
saves what each did.

Usage: whole_steps.py DIRECTORY CASE...; a case is LAYOUT:ALGORITHM:MODEL of `support.layouts`.
DIRECTORY holds a checkpoint for each model, with its `rollouts`.
"""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from launch.testbed.policies import make_batcher, make_planner, make_policy, make_view
from megatron_rl.config.schema import (
    EngineSettings,
    LoggerSettings,
    ModelSettings,
    RunSettings,
    TrainSettings,
)
from megatron_rl.contracts.group import RolloutLocation
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.assign import Credit
from megatron_rl.mcore import parallel
from megatron_rl.mcore.optimizer import DistributedAdam, StepResult
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.rollouts.store import RolloutStore
from megatron_rl.training.collectives import broadcast_bytes
from megatron_rl.training.micro_batches import Batcher, MicroBatch
from megatron_rl.training.worker import Worker, gather_receivers
from tests.support.judged_batches import judged_groups
from tests.support.layouts import (
    ALGORITHMS,
    BATCH,
    BATCHES,
    CREDIT,
    LAYOUTS,
    OPTIMIZER,
    STEPS_PER_BATCH,
    TEMPERATURE,
    TOTAL_STEPS,
    LayoutCase,
)
from tests.support.recordings import read_rollouts
from tests.support.router_calls import RouterCalls


class RecordingBatcher(Batcher):
    """Keeps the micro-batches that it packed last."""

    packed: list[list[MicroBatch]]

    def optimizer_steps(self, *args: Any) -> list[list[MicroBatch]]:
        self.packed = super().optimizer_steps(*args)
        return self.packed


class RecordingAdam(DistributedAdam):
    """Keeps what every step says of itself, and the smallest gradient of a router."""

    def __init__(self, models: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__(models, *args, **kwargs)
        self.taken: list[StepResult] = []
        self.routers = RouterCalls(models)
        self.router_gradients: list[float] = []

    def step(self, *, loss_is_finite: bool) -> StepResult:
        self.router_gradients += self.routers.gradients()
        self.taken.append(super().step(loss_is_finite=loss_is_finite))
        return self.taken[-1]


def build(
    case: LayoutCase, layout: RankLayout, directory: Path
) -> tuple[Worker, RecordingAdam, RecordingBatcher]:
    chosen, checkpoint = LAYOUTS[case.layout], directory / case.model
    grid = chosen.parallel
    shape, policy = make_policy(
        checkpoint,
        grid,
        ALGORITHMS[case.algorithm],
        recompute=chosen.recompute,
        dtype=chosen.dtype,
        temperature=TEMPERATURE,
        **layout.groups,
    )
    adam = RecordingAdam(policy.models, OPTIMIZER, total_steps=TOTAL_STEPS)
    batcher = make_batcher(shape, grid, layout, RecordingBatcher)
    assert isinstance(batcher, RecordingBatcher)
    worker = Worker(
        layout=layout,
        receivers=gather_receivers(
            layout, make_view(shape, grid, layout).moe_rows(shape.moe_layers)
        ),
        shape=shape,
        policy=policy,
        optimizer=adam,
        batcher=batcher,
        model=ModelSettings(path=str(checkpoint)),
        engine=EngineSettings(dtype="float32"),
        run=RunSettings(),
        logger=LoggerSettings(),
        settings=TrainSettings(total_steps=1, max_route_disagreement=1),  # their routes are random
        rollouts_directory=directory,
    )
    return worker, adam, batcher


def locate(
    layout: RankLayout, store: RolloutStore, rollouts: Sequence[Rollout], batch: int
) -> list[RolloutLocation]:
    """Every rollout lies in rank 0's memory; all ranks learn where."""
    data = msgspec.msgpack.encode(store.put(str(batch), rollouts)) if layout.rank == 0 else None
    return msgspec.msgpack.decode(
        broadcast_bytes(data, layout.control_group), type=list[RolloutLocation]
    )


def planned(plan: StepPlan) -> list[list[str]]:
    """The rollouts of each optimizer step."""
    return [
        sorted(
            plan.rollouts[i].rollout_id
            for rank in step.micro_batches
            for batch in rank
            for i in batch
        )
        for step in plan.optimizer_steps
    ]


def play(case: LayoutCase, layout: RankLayout, directory: Path) -> None:
    worker, adam, batcher = build(case, layout, directory)
    calls = 0
    store, credit, said = (
        RolloutStore(node=0),
        Credit(ALGORITHMS[case.algorithm], CREDIT, seed=0),
        [],
    )
    grid, tokens = LAYOUTS[case.layout].parallel, 80 if layout.dp_size == 1 else 40
    planner = make_planner(
        grid, layout, optimizer_steps_per_batch=STEPS_PER_BATCH, tokens_per_micro_batch=tokens
    )
    rollouts = read_rollouts(directory / case.model / "rollouts")
    for batch in range(BATCHES):
        mine = rollouts[batch * BATCH : (batch + 1) * BATCH]
        credited = credit.assign(batch, judged_groups(mine, locate(layout, store, mine, batch)))
        plan = planner.plan(batch, credited.rollouts, credited.advantages, credited.extra_rollouts)
        outcome = worker.train(plan)
        assert outcome.finite and outcome.optimizer_steps == STEPS_PER_BATCH
        calls += adam.routers.check(
            batcher.packed, with_recomputation=LAYOUTS[case.layout].recompute == "full"
        )
        fewest = 3 if grid.pp > 1 else 2  # several in flight in a pipeline
        assert all(len(step.micro_batches[0]) >= fewest for step in plan.optimizer_steps)
        names, metrics = [ref.rollout_id for ref in plan.rollouts], outcome.metrics.values()
        given = dict(
            zip(names, zip(plan.advantages, plan.entropy_advantages, strict=True), strict=True)
        )
        said.append({"steps": planned(plan), "advantages": given, "metrics": metrics})
    weights = {name: tensor.clone() for name, tensor in worker.export()}
    routers: list[Any] = [None] * layout.world_size
    dist.all_gather_object(routers, (calls, min(adam.router_gradients, default=None)))
    if layout.rank == 0:
        steps = {
            "grad_norms": [s.grad_norm for s in adam.taken],
            "rates": [s.lr for s in adam.taken],
        }
        torch.save(
            {"batches": said, "weights": weights, "routers": routers, **steps},
            directory / f"{case}.pt",
        )
    dist.barrier()


def main() -> None:
    directory, cases = Path(sys.argv[1]), [LayoutCase.parse(name) for name in sys.argv[2:]]
    for settings, same_grid in itertools.groupby(cases, lambda case: LAYOUTS[case.layout].parallel):
        layout = parallel.initialize(settings, seed=0)
        for case in same_grid:
            play(case, layout, directory)
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


if __name__ == "__main__":
    main()
