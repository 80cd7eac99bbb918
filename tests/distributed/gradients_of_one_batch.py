"""Script for torchrun: the gradient of one global batch, for several ways to split it.

Rank 0 saves each gradient. Every call of every router is checked against the routes of its
micro-batch.

Usage: gradients_of_one_batch.py OUT CASE...; a case is
LOSS:GRID:RECOMPUTE:TOKENS_PER_MICRO_BATCH:SEED.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.config.algorithms import AlgoSettings, EspoSettings, GrpoSettings
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.mcore import parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights import OwnedWeights
from megatron_rl.models.shape import ModelShape
from megatron_rl.rollouts.wire.codec import select_layers
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from tests.support.batches import make_batch
from tests.support.policies import (
    COLUMN_ADDITION,
    make_batcher,
    make_planner,
    make_policy,
    make_view,
)
from tests.support.routers import check_routers

GRIDS: dict[str, dict[str, Any]] = {
    "dp": {},
    "ep2": {"ep": 2},
    "pp2": {"pp": 2},
    "pp2_vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
}
ALGORITHMS: dict[str, AlgoSettings] = {"grpo": GrpoSettings(), "espo": EspoSettings()}


def gradient(
    policy: Policy,
    batches: list[MicroBatch],
    denominators: Denominators,
    shape: ModelShape,
    layout: RankLayout,
    *,
    with_recomputation: bool,
) -> dict[str, torch.Tensor]:
    """Return the reduced gradient under Hugging Face names, on rank 0 (a collective).

    The gradient replaces the weights of the model.
    """
    for chunk in policy.models:
        chunk.zero_grad_buffer()
    objectives = compute_old_policy(policy, batches, MetricSums())

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        logprob, entropy = policy.logprobs(logits, batches[index])
        # Away from the old policy, because otherwise every ratio is 1 and nothing is clipped
        shifted_logprob = logprob + 0.3 * torch.sin(logprob.detach())
        return objectives[index](shifted_logprob, entropy, denominators).loss, None

    inputs = [batch.inputs for batch in batches]
    with check_routers(policy.models, inputs, with_recomputation=with_recomputation):
        run_schedule(policy.models, inputs, loss, forward_only=False, replay=policy.replay)
    for chunk in policy.models:
        gather_gradients(chunk)
        for weight in chunk.parameters():
            weight.data = weight.main_grad.clone()
    weights = OwnedWeights(policy.models, shape, layout, None, iter, bucket_bytes=1 << 20)
    return {name: tensor.clone() for name, tensor in weights.stream_all()}


def gather_gradients(chunk: Any) -> None:
    """Make every rank's gradient buffers whole. Each rank holds one shard of the reduced sum."""
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        group = buffer.data_parallel_group
        for bucket in buffer.buckets:
            shards = bucket.grad_data.chunk(dist.get_world_size(group))
            for rank, shard in enumerate(shards):
                if rank != dist.get_rank(group):
                    shard.zero_()
            dist.all_reduce(bucket.grad_data, group=group)


def one_case(case: str, layout: RankLayout, settings: ParallelSettings) -> dict[str, torch.Tensor]:
    loss, _, recompute, tokens, seed = case.split(":")
    shape, policy = make_policy(
        COLUMN_ADDITION,
        settings,
        ALGORITHMS[loss],
        recompute=recompute,
        temperature=0.8,
        **layout.groups,
    )
    refs, rollouts, advantages = make_batch(shape, 24)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    planner = make_planner(settings, layout, seed=int(seed), tokens_per_micro_batch=int(tokens))
    plan = planner.plan(0, refs, advantages)
    moe_rows = make_view(shape, settings, layout).moe_rows(shape.moe_layers)
    local_rollouts = {
        i: select_layers(by_id[ref.rollout_id], moe_rows) for i, ref in enumerate(plan.rollouts)
    }
    (batches,) = make_batcher(shape, settings, layout).optimizer_steps(
        plan, layout.dp_rank, local_rollouts
    )
    if layout.rank == 0:
        print(f"{case}: {len(batches)} micro-batches per rank", flush=True)
    return gradient(
        policy,
        batches,
        plan.optimizer_steps[0].denominators,
        shape,
        layout,
        with_recomputation=recompute == "full",
    )


def main() -> None:
    out, *cases = sys.argv[1:]
    for grid, same_layout in itertools.groupby(
        sorted(cases, key=lambda c: c.split(":")[1]), lambda c: c.split(":")[1]
    ):
        settings = ParallelSettings(**GRIDS[grid], timeout_s=60)
        layout = parallel.initialize(settings, seed=0)
        for case in same_layout:
            result = one_case(case, layout, settings)
            if layout.rank == 0:
                torch.save(result, Path(out) / f"{case}.pt")
        parallel_state.destroy_model_parallel()
    parallel.shutdown()


if __name__ == "__main__":
    main()
