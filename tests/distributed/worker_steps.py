"""Under torchrun: a real `Worker` trains one step, with rollouts exchanged across two pretended
nodes.

Usage: worker_steps.py OUT SCENARIO...; a scenario is `finite`, `nan_on_rank_1`,
`nan_logits_on_rank_1`, `skipped` or `fault_on_rank_1`: with expert parallelism, or behind
`pipeline_` with two stages; and `recorded` behind a name of `GRIDS`, where the trainer's own routes
are replayed. Each rank checks itself and rank 0 prints what happened as JSON.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from launch.testbed.batches import make_batch
from launch.testbed.policies import (
    ADAM,
    COLUMN_ADDITION,
    make_batcher,
    make_planner,
    make_policy,
    make_view,
)
from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import (
    EngineSettings,
    LoggerSettings,
    ModelSettings,
    ParallelSettings,
    RunSettings,
    TrainSettings,
)
from megatron_rl.contracts.group import RolloutLocation, RolloutRef
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore import parallel
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.router_target import ReplayError
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.rollouts.store import RolloutStore
from megatron_rl.training.collectives import broadcast_bytes, gather_bytes
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.replay import update_routes
from megatron_rl.training.worker import Worker, gather_receivers
from tests.support.routers import check_routers

GRIDS = {
    "": ParallelSettings(ep=2, timeout_s=60),
    "pipeline": ParallelSettings(pp=2, timeout_s=60),
    "interleaved": ParallelSettings(pp=2, vpp=2, timeout_s=60),
    "tensor": ParallelSettings(tp=2, ep=2, sequence_parallel=True, timeout_s=60),
    "context": ParallelSettings(cp=2, ep=2, timeout_s=60),
}


def settings_of(scenario: str) -> ParallelSettings:
    return GRIDS[scenario.partition("_")[0] if scenario.partition("_")[0] in GRIDS else ""]


def build(layout: RankLayout, rollouts: Path, settings: ParallelSettings, scenario: str) -> Worker:
    own = scenario == "recorded"
    shape, policy = make_policy(
        COLUMN_ADDITION,
        settings,
        GrpoSettings(),
        recompute="full" if own else "none",
        source="trainer" if own else "rollout",
        **layout.groups,
    )
    held = make_view(shape, settings, layout).moe_rows(shape.moe_layers)
    receivers = gather_receivers(dataclasses.replace(layout, node=layout.rank), held)
    return Worker(
        layout=layout,
        receivers=receivers,
        shape=shape,
        policy=policy,
        optimizer=DistributedAdam(policy.models, ADAM, total_steps=10),
        batcher=make_batcher(shape, settings, layout, replayed=not own),
        model=ModelSettings(path=str(COLUMN_ADDITION)),
        engine=EngineSettings(),
        run=RunSettings(),
        logger=LoggerSettings(),
        settings=TrainSettings(  # their routes are random
            total_steps=1, max_route_disagreement=1, replay_measure_every=0 if own else 3
        ),
        rollouts_directory=rollouts,
    )


def store_rollouts(worker: Worker, count: int) -> tuple[RolloutStore, list[RolloutRef]]:
    """Every rollout lies on node 0, in rank 0's memory; all ranks learn where."""
    refs, rollouts, _ = make_batch(worker.shape, count)
    store = RolloutStore(node=0)
    data = None
    if worker.layout.rank == 0:
        data = msgspec.msgpack.encode(store.put("group", rollouts))
    where = msgspec.msgpack.decode(
        broadcast_bytes(data, worker.layout.control_group), type=list[RolloutLocation]
    )
    return store, [
        msgspec.structs.replace(ref, location=w) for ref, w in zip(refs, where, strict=True)
    ]


def weights(worker: Worker) -> torch.Tensor:
    return torch.cat(
        [p.detach().flatten().clone() for m in worker.policy.models for p in m.parameters()]
    )


def play(layout: RankLayout, out: Path, name: str) -> None:
    settings = settings_of(name)
    scenario = name if settings is GRIDS[""] else name.partition("_")[2]
    worker = build(layout, out, settings, scenario)
    _store, refs = store_rollouts(worker, 9)
    advantages = [0.0 if scenario == "skipped" else (-1.0) ** i for i in range(len(refs))]
    planner = make_planner(settings, layout, optimizer_steps_per_batch=2, tokens_per_micro_batch=64)
    plan = planner.plan(3, refs, advantages)
    if scenario == "nan_on_rank_1":
        poisoned = plan.optimizer_steps[0].micro_batches[1][0][0]
        broken = tuple(float("nan") if i == poisoned else a for i, a in enumerate(plan.advantages))
        plan = msgspec.structs.replace(plan, advantages=broken)
    if scenario == "nan_logits_on_rank_1" and layout.rank == 1:
        with torch.no_grad():
            next(
                p for n, p in worker.policy.models[-1].named_parameters() if "final_layernorm" in n
            ).fill_(torch.nan)
    before = weights(worker)
    if scenario == "recorded":
        described = train_recorded(worker, plan)
        if layout.rank == 0:
            print(f"RESULT {name} {json.dumps(described)}", flush=True)
    if scenario == "fault_on_rank_1":
        fail_to_replay(layout, worker, plan, before, name)
    if scenario in ("recorded", "fault_on_rank_1"):
        return
    outcome = worker.train(plan)
    unchanged = torch.equal(torch.nan_to_num(before), torch.nan_to_num(weights(worker)))
    assert unchanged == (scenario != "finite"), (
        f"rank {layout.rank}: weights unchanged is {unchanged}"
    )
    if layout.rank == 0:
        steps = outcome.optimizer_steps
        described = {
            "finite": outcome.finite,
            "optimizer_steps": steps,
            "metrics": outcome.metrics.values(),
        }
        print(f"RESULT {name} {json.dumps(described)}", flush=True)
    torch.distributed.barrier()


def train_recorded(worker: Worker, plan: StepPlan) -> dict[str, float]:
    """The weights move after the old-policy pass; the update's passes use the routes of that one,
    over both steps.
    """
    updated: list[MicroBatch] = []
    with_routes, updates = update_routes.with_routes, contextlib.ExitStack()

    def moved(steps: Any, recorded: Any) -> Any:
        assert not updated
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for model in worker.policy.models:
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)
        steps = with_routes(steps, recorded)
        updated.extend(batch for step in steps for batch in step)
        packed = [batch.inputs for batch in updated]
        updates.enter_context(check_routers(worker.policy.models, packed, with_recomputation=True))
        return steps

    update_routes.with_routes = moved
    with updates:
        assert worker.train(plan).finite
    update_routes.with_routes = with_routes
    assert len(updated) > 2 and all(batch.inputs.routes is not None for batch in updated)
    live = routes_chosen(worker, updated)  # after the weights have moved
    forced = [
        batch.inputs.routes.long().sort(-1).values
        for batch in updated
        if batch.inputs.routes is not None
    ]
    differing = torch.cat(
        [(a.long().sort(-1).values != b).any(-1) for a, b in zip(live, forced, strict=True)]
    )
    return {"compared": len(updated), "would_differ": float(differing.float().mean())}


def routes_chosen(worker: Worker, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    assert worker.policy.replay is not None
    packed = [batch.inputs for batch in batches]
    run_schedule(
        worker.policy.models,
        packed,
        lambda *_: (None, None),
        forward_only=True,
        replay=worker.policy.replay,
        routing="record",
    )
    found = worker.policy.replay.take_recorded_routes(len(packed))
    return [routes for routes in found if routes is not None]


def fail_to_replay(
    layout: RankLayout, worker: Worker, plan: StepPlan, before: torch.Tensor, name: str
) -> None:
    """Rank 1's first router runs twice: every rank ends the step with the same words, and no weight
    has moved.
    """
    if layout.rank == 1:
        router = next(
            m
            for model in worker.policy.models
            for m in model.modules()
            if isinstance(m, TopKRouter)
        )
        router.register_forward_pre_hook(
            lambda module, inputs: module.routing(module.gating(inputs[0])) and None
        )
    try:
        worker.train(plan)
    except ReplayError as error:
        assert torch.equal(before, weights(worker))
        said = gather_bytes(str(error).encode(), layout.control_group)
        assert len(set(said)) == 1
        if layout.rank == 0:
            print(f"RESULT {name} {json.dumps({'error': said[1].decode()})}", flush=True)
    else:
        raise AssertionError(f"rank {layout.rank} went on")


def main() -> None:
    out, *scenarios = sys.argv[1:]
    for settings, same_grid in itertools.groupby(scenarios, settings_of):
        layout = parallel.initialize(settings, seed=0)
        for scenario in same_grid:
            play(layout, Path(out) / scenario, scenario)
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


if __name__ == "__main__":
    main()
