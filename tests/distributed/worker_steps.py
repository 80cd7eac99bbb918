"""Script for torchrun: a real `Worker` trains one step.

The rollouts are exchanged across two simulated nodes.

Usage: worker_steps.py OUT SCENARIO...; a scenario is `finite`, `nan_on_rank_1`,
`nan_logits_on_rank_1`, `skipped` or `fault_on_rank_1`, with expert parallelism or, after
`pipeline_`, with two pipeline stages. `recorded` may follow each name of `GRIDS`: it replays the
trainer's own routes. So may `samples_float32` and `samples_bfloat16`, which write samples to OUT.
Rank 0 prints each result as JSON.
"""

import contextlib
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.mcore import compat

compat.install()

import msgspec
import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import (
    EngineSettings,
    ModelSettings,
    ParallelSettings,
    TrainSettings,
)
from megatron_rl.contracts.group import RolloutLocation, RolloutRef
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.mcore import parallel
from megatron_rl.mcore.collectives import broadcast_bytes, gather_bytes
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.rollouts.wire.store import RolloutStore
from megatron_rl.training.batch_recording import BatchRecorder
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.replay import update_routes
from megatron_rl.training.worker import Worker, gather_receivers
from tests.distributed.kept_samples import spread_over_nodes, train_with_samples
from tests.support.batches import make_batch
from tests.support.policies import (
    ADAM,
    COLUMN_ADDITION,
    make_batcher,
    make_planner,
    make_policy,
    make_view,
)
from tests.support.routers import check_routers

GRIDS = {
    "": ParallelSettings(ep=2, timeout_s=60),
    "pipeline": ParallelSettings(pp=2, timeout_s=60),
    "interleaved": ParallelSettings(pp=2, vpp=2, timeout_s=60),
    "tensor": ParallelSettings(tp=2, ep=2, timeout_s=60),
    "context": ParallelSettings(cp=2, ep=2, timeout_s=60),
}


def settings_of(scenario: str) -> ParallelSettings:
    return GRIDS[scenario.partition("_")[0] if scenario.partition("_")[0] in GRIDS else ""]


def build(layout: RankLayout, rollouts: Path, settings: ParallelSettings, scenario: str) -> Worker:
    is_recorded = scenario == "recorded"
    groups: dict[str, Any] = layout.groups
    shape, policy = make_policy(
        COLUMN_ADDITION,
        settings,
        GrpoSettings(),
        recompute="full" if is_recorded else "none",
        source="trainer" if is_recorded else "rollout",
        dtype="bfloat16" if scenario.endswith("bfloat16") else "float32",
        **groups,
    )
    moe_rows = make_view(shape, settings, layout).moe_rows(shape.moe_layers)
    receivers = gather_receivers(dataclasses.replace(layout, node=layout.rank), moe_rows)
    return Worker(
        layout=layout,
        receivers=receivers,
        shape=shape,
        policy=policy,
        optimizer=DistributedAdam(policy.models, ADAM, total_steps=10),
        batcher=make_batcher(shape, settings, layout, replay=not is_recorded),
        model=ModelSettings(path=str(COLUMN_ADDITION)),
        engine=EngineSettings(),
        # The routes are random, so that all of them differ from the routers' choices
        settings=TrainSettings(
            total_steps=1,
            max_route_disagreement=1,
            replay_measure_every=0 if is_recorded or scenario.startswith("samples") else 3,
        ),
        recorder=BatchRecorder(rollouts, 0, receivers, layout.rank, layout.control_group),
    )


def store_rollouts(worker: Worker, count: int) -> tuple[RolloutStore, list[RolloutRef]]:
    """Store rollouts in rank 0's memory, on node 0, and return references on all ranks."""
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


def run_scenario(layout: RankLayout, out: Path, name: str) -> None:
    settings = settings_of(name)
    scenario = name if settings is GRIDS[""] else name.partition("_")[2]
    worker = build(layout, out, settings, scenario)
    store, refs = store_rollouts(worker, 9)
    if scenario.startswith("samples"):
        refs = spread_over_nodes(refs)
    plan = make_plan(worker, settings, scenario, refs)
    if scenario == "nan_logits_on_rank_1" and layout.rank == 1:
        fill_final_norm_with_nan(worker)
    if scenario == "recorded":
        print_result(layout, name, train_with_recorded_routes(worker, plan))
    elif scenario.startswith("samples"):
        result = train_with_samples(lambda: build(layout, out, settings, scenario), plan, out)
        print_result(layout, name, result)
    elif scenario == "fault_on_rank_1":
        print_result(layout, name, fail_to_replay(layout, worker, plan))
    else:
        print_result(layout, name, train(layout, worker, plan, scenario))
        torch.distributed.barrier()
    store.release(["group"])


def print_result(layout: RankLayout, name: str, result: dict[str, Any]) -> None:
    if layout.rank == 0:
        print(f"RESULT {name} {json.dumps(result)}", flush=True)


def make_plan(
    worker: Worker, settings: ParallelSettings, scenario: str, refs: Sequence[RolloutRef]
) -> StepPlan:
    advantages = [0.0 if scenario == "skipped" else (-1.0) ** i for i in range(len(refs))]
    planner = make_planner(
        settings, worker.layout, optimizer_steps_per_batch=2, tokens_per_micro_batch=64
    )
    plan = planner.plan(3, refs, advantages)
    if scenario != "nan_on_rank_1":
        return plan
    nan_index = plan.optimizer_steps[0].micro_batches[1][0][0]
    plan_advantages = list(plan.advantages)
    plan_advantages[nan_index] = float("nan")
    return msgspec.structs.replace(plan, advantages=tuple(plan_advantages))


def fill_final_norm_with_nan(worker: Worker) -> None:
    with torch.no_grad():
        for name, weight in worker.policy.models[-1].named_parameters():
            if "final_layernorm" in name:
                weight.fill_(torch.nan)
                return


def train(layout: RankLayout, worker: Worker, plan: StepPlan, scenario: str) -> dict[str, Any]:
    """Train the step and check that weights change only if it is finite."""
    before = weights(worker)
    outcome = worker.train(plan)
    is_unchanged = torch.equal(torch.nan_to_num(before), torch.nan_to_num(weights(worker)))
    assert is_unchanged == (scenario != "finite"), (
        f"rank {layout.rank}: weights unchanged is {is_unchanged}"
    )
    return {
        "finite": outcome.finite,
        "optimizer_steps": outcome.optimizer_steps,
        "metrics": outcome.metrics.values(),
    }


def train_with_recorded_routes(worker: Worker, plan: StepPlan) -> dict[str, Any]:
    """Train a step whose weights are changed after the old-policy pass.

    The passes of both optimizer steps must use the routes of the old-policy pass.
    """
    batches: list[MicroBatch] = []
    with_routes = update_routes.with_routes
    router_checks = contextlib.ExitStack()

    def change_weights_and_check_routers(steps: Any, routes: Any) -> Any:
        assert not batches
        add_noise(worker)
        steps = with_routes(steps, routes)
        batches.extend(batch for step in steps for batch in step)
        inputs = [batch.inputs for batch in batches]
        router_checks.enter_context(
            check_routers(worker.policy.models, inputs, with_recomputation=True)
        )
        return steps

    update_routes.with_routes = change_weights_and_check_routers
    with router_checks:
        assert worker.train(plan).finite
    update_routes.with_routes = with_routes
    assert len(batches) > 2
    return {"compared": len(batches), "would_differ": share_of_other_routes(worker, batches)}


def add_noise(worker: Worker) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for model in worker.policy.models:
            for weight in model.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)


def share_of_other_routes(worker: Worker, batches: Sequence[MicroBatch]) -> float:
    """Return the share of rows for which the routers now choose other experts."""
    differences = []
    for batch, live_routes in zip(batches, live_routes_of(worker, batches), strict=True):
        assert batch.inputs.routes is not None
        replayed_routes = batch.inputs.routes.long().sort(-1).values
        differences.append((live_routes.long().sort(-1).values != replayed_routes).any(-1))
    return float(torch.cat(differences).float().mean())


def live_routes_of(worker: Worker, batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
    assert worker.policy.replay is not None
    run_schedule(
        worker.policy.models,
        [batch.inputs for batch in batches],
        lambda *_: (None, None),
        forward_only=True,
        replay=worker.policy.replay,
        routing="record",
    )
    recordings = worker.policy.replay.take_recorded_routes(len(batches))
    return [routes for routes in recordings if routes is not None]


def fail_to_replay(layout: RankLayout, worker: Worker, plan: StepPlan) -> dict[str, Any]:
    """Run rank 1's first router twice.

    Every rank must end the step with the same message, and no weight may change.
    """
    before = weights(worker)
    if layout.rank == 1:
        modules = [m for model in worker.policy.models for m in model.modules()]
        router = next(module for module in modules if isinstance(module, TopKRouter))
        router.register_forward_pre_hook(
            lambda module, inputs: module.routing(module.gating(inputs[0])) and None
        )
    try:
        worker.train(plan)
    except Failure as error:
        assert torch.equal(before, weights(worker))
        messages = gather_bytes(str(error).encode(), layout.control_group)
        assert len(set(messages)) == 1
        return {"error": messages[1].decode()}
    raise AssertionError(f"rank {layout.rank} raised nothing")


def main() -> None:
    out, *scenarios = sys.argv[1:]
    for settings, same_grid in itertools.groupby(scenarios, settings_of):
        layout = parallel.initialize(settings, seed=0)
        for scenario in same_grid:
            run_scenario(layout, Path(out) / scenario, scenario)
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


if __name__ == "__main__":
    main()
