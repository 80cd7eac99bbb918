"""Under torchrun: a real `Worker` trains one step, with rollouts exchanged across two pretended nodes.

Usage: worker_steps.py OUT SCENARIO...; a scenario is `finite`, `nan_on_rank_1`, `nan_logits_on_rank_1` or `skipped`:
with expert parallelism, or behind `pipeline_` with two stages. Each rank checks itself and rank 0 prints what happened
as JSON.
"""

import dataclasses
import itertools
import json
import sys
from pathlib import Path

from megatron_rl.mcore.cpu import compat

compat.install()

import msgspec
import torch
from megatron.core import parallel_state

from megatron_rl.config.schema import (
    EngineSettings,
    GrpoSettings,
    LoggerSettings,
    ModelSettings,
    ParallelSettings,
    RunSettings,
    TrainSettings,
)
from megatron_rl.contracts.group import RolloutLocation, RolloutRef
from megatron_rl.mcore import parallel
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.rollouts.store import RolloutStore
from megatron_rl.training.collectives import broadcast_bytes
from megatron_rl.training.worker import Worker, gather_receivers
from support.batches import make_batch
from support.policies import ADAM, COLUMN_ADDITION, make_batcher, make_planner, make_policy, make_view

EXPERTS, PIPELINE = ParallelSettings(ep=2, timeout_s=60), ParallelSettings(pp=2, timeout_s=60)


def settings_of(scenario: str) -> ParallelSettings:
    return PIPELINE if scenario.startswith("pipeline_") else EXPERTS


def build(layout: RankLayout, rollouts: Path, settings: ParallelSettings) -> Worker:
    shape, policy = make_policy(COLUMN_ADDITION, settings, GrpoSettings())
    held = make_view(shape, settings, layout).moe_rows(shape.moe_layers)
    receivers = gather_receivers(dataclasses.replace(layout, node=layout.rank), held)
    return Worker(
        layout=layout,
        receivers=receivers,
        shape=shape,
        policy=policy,
        optimizer=DistributedAdam(policy.models, ADAM, total_steps=10),
        batcher=make_batcher(shape, settings, layout),
        model=ModelSettings(path=str(COLUMN_ADDITION)),
        engine=EngineSettings(),
        run=RunSettings(),
        logger=LoggerSettings(),
        settings=TrainSettings(total_steps=1, max_route_disagreement=1),  # their routes are random
        rollouts_directory=rollouts,
    )


def store_rollouts(worker: Worker, count: int) -> tuple[RolloutStore, list[RolloutRef]]:
    """Every rollout lies on node 0, in rank 0's memory; all ranks learn where."""
    refs, rollouts, _ = make_batch(worker.shape, count)
    store = RolloutStore(node=0)
    data = None
    if worker.layout.rank == 0:
        data = msgspec.msgpack.encode(store.put("group", rollouts))
    where = msgspec.msgpack.decode(broadcast_bytes(data, worker.layout.control_group), type=list[RolloutLocation])
    return store, [msgspec.structs.replace(ref, location=w) for ref, w in zip(refs, where, strict=True)]


def weights(worker: Worker) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for m in worker.policy.models for p in m.parameters()])


def play(layout: RankLayout, out: Path, name: str) -> None:
    settings, scenario = settings_of(name), name.removeprefix("pipeline_")
    worker = build(layout, out, settings)
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
            next(p for n, p in worker.policy.models[-1].named_parameters() if "final_layernorm" in n).fill_(torch.nan)
    before = weights(worker)
    outcome = worker.train(plan)
    unchanged = torch.equal(torch.nan_to_num(before), torch.nan_to_num(weights(worker)))
    assert unchanged == (scenario != "finite"), f"rank {layout.rank}: weights unchanged is {unchanged}"
    if layout.rank == 0:
        steps = outcome.optimizer_steps
        described = {"finite": outcome.finite, "optimizer_steps": steps, "metrics": outcome.metrics.values()}
        print(f"RESULT {name} {json.dumps(described)}", flush=True)
    torch.distributed.barrier()


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
