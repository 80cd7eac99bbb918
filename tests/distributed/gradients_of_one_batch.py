"""Under torchrun: the gradient of one fixed global batch, for several ways to split it; rank 0 saves each.

Usage: gradients_of_one_batch.py CHECKPOINT OUT EP LOSS RECOMPUTE VARIANT...; a variant is TOKENS_PER_MICRO_BATCH:SEED.
"""

import sys
from pathlib import Path

from megatron_rl.mcore.cpu import compat

compat.install()

import torch
import torch.distributed as dist

from megatron_rl.contracts.plan import Denominators
from megatron_rl.losses import build_policy_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.model import ParallelSizes, build_models
from megatron_rl.mcore.optimizer import wrap_data_parallel
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.mcore.weights import iterate_hf_weights, load_hf_weights
from megatron_rl.models.qwen3_moe import ModelShape, read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_plan import plan_step
from megatron_rl.records.metric_sums import MetricSums
from megatron_rl.rollouts.messages import RouteShape
from megatron_rl.training.batch import Batcher, MicroBatch
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from support.batches import make_batch


def gradient(
    policy: Policy, batches: list[MicroBatch], denominators: Denominators, model: ModelShape
) -> dict[str, torch.Tensor]:
    """The reduced gradient under Hugging Face names (a collective)."""
    for chunk in policy.models:
        chunk.zero_grad_buffer()
    old = compute_old_policy(policy, batches, MetricSums())

    def loss(logits: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        logprob, _ = policy.logprobs(logits, batches[index])
        # away from the old policy, or every ratio is one and clipping never matters
        moved = logprob + 0.3 * torch.sin(logprob.detach())
        return policy.loss(moved, old[index].response, old[index].groups, denominators).loss, None

    run_schedule(policy.models, [b.packed for b in batches], loss, forward_only=False, replay=policy.replay)
    for chunk in policy.models:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = bucket.grad_data.chunk(dist.get_world_size(group))
                for rank, shard in enumerate(shards):
                    if rank != dist.get_rank(group):
                        shard.zero_()  # only the own shard of a reduce-scattered gradient is meaningful
                dist.all_reduce(bucket.grad_data, group=group)
        for weight in chunk.parameters():
            weight.data = weight.main_grad.clone()
    return {name: tensor.clone() for name, tensor in iterate_hf_weights(policy.models, model)}


def main() -> None:
    checkpoint, out, ep, loss, recompute, *variants = sys.argv[1:]
    sizes = ParallelSizes(ep=int(ep))
    layout = parallel.initialize(sizes, seed=0, timeout_s=60)
    model = read_shape(checkpoint)
    models = wrap_data_parallel(build_models(model, sizes, dtype=torch.float32, recompute=recompute))
    samples, rollouts, advantages = make_batch(model, 24)
    payload = {rollout.rollout_id: rollout for rollout in rollouts}
    policy = Policy(
        models=models,
        logprobs=ResponseLogprobs(temperature=0.8, vocab_size=model.vocab_size, chunk_tokens=50, tp_group=None),
        loss=build_policy_loss(loss, **({"vocab_size": model.vocab_size} if loss == "espo" else {})),
        replay=RouteReplay(models),
    )
    routes = RouteShape(
        moe_layers=model.moe_layers, num_hidden_layers=model.num_layers, num_experts=model.num_experts, topk=model.topk
    )
    batcher = Batcher(RankView.of(num_layers=model.num_layers), routes, layout.device)
    for variant in variants:
        load_hf_weights(models, model, checkpoint)
        tokens, seed = (int(part) for part in variant.split(":"))
        plan = plan_step(
            0, samples, advantages, dp_size=layout.dp_size, optimizer_steps=1, tokens_per_micro_batch=tokens, seed=seed
        )
        payloads = {i: payload[sample.rollout_id] for i, sample in enumerate(plan.samples)}
        (batches,) = batcher.optimizer_steps(plan, layout.dp_rank, payloads)
        result = gradient(policy, batches, plan.optimizer_steps[0].denominators, model)
        if layout.rank == 0:
            torch.save(result, Path(out) / f"{variant.replace(':', '-')}.pt")
            print(f"{variant}: {len(batches)} micro-batches per rank", flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    main()
