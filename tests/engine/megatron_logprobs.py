"""Under torchrun: Megatron's log-probabilities of recorded rollouts, packed, routes replayed; rank 0 saves them.

Usage: megatron_logprobs.py CHECKPOINT ROLLOUTS OUT EP TOKENS_PER_MICRO_BATCH
"""

import sys
from pathlib import Path

from megatron_rl.mcore.cpu import compat

compat.install()

import torch
import torch.distributed as dist

from megatron_rl.losses import build_policy_loss
from megatron_rl.mcore import parallel
from megatron_rl.mcore.model import ParallelSizes, build_models
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights import load_hf_weights
from megatron_rl.models.qwen3_moe import read_shape
from megatron_rl.planning.rank_view import RankView
from megatron_rl.planning.step_plan import plan_step
from megatron_rl.records.metric_sums import MetricSums
from megatron_rl.training.batch import Batcher
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from support.engines import route_shape
from support.rollout_files import read_rollouts
from support.rollouts import make_ref


def main() -> None:
    checkpoint, rollouts_file, out, ep, tokens = sys.argv[1:]
    sizes = ParallelSizes(ep=int(ep))
    layout = parallel.initialize(sizes, seed=0, timeout_s=120)
    model = read_shape(checkpoint)
    models = build_models(model, sizes, dtype=torch.float32)
    load_hf_weights(models, model, checkpoint)
    rollouts = read_rollouts(Path(rollouts_file))
    plan = plan_step(
        0,
        [make_ref(rollout) for rollout in rollouts],
        [1.0] * len(rollouts),
        dp_size=layout.dp_size,
        optimizer_steps=1,
        tokens_per_micro_batch=int(tokens),
    )
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    payloads = {i: by_id[sample.rollout_id] for i, sample in enumerate(plan.samples)}
    batcher = Batcher(RankView.of(num_layers=model.num_layers), route_shape(model), layout.device)
    (batches,) = batcher.optimizer_steps(plan, layout.dp_rank, payloads)
    policy = Policy(
        models=models,
        logprobs=ResponseLogprobs(temperature=1.0, vocab_size=model.vocab_size, chunk_tokens=1024, tp_group=None),
        loss=build_policy_loss("grpo"),
        replay=RouteReplay(models),
    )
    metrics = MetricSums()
    old = compute_old_policy(policy, batches, metrics)
    mine = {}
    for indices, result in zip(plan.optimizer_steps[0].micro_batches[layout.dp_rank], old, strict=True):
        bounds = result.response.cu_seqlens.tolist()
        for i, start, stop in zip(indices, bounds, bounds[1:], strict=False):
            mine[plan.samples[i].rollout_id] = result.response.old_logprobs[start:stop].clone()
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in range(layout.world_size)]
    dist.all_gather_object(everyone, mine)
    if layout.rank == 0:
        torch.save({name: value for part in everyone for name, value in part.items()}, out)
        print(metrics.values(), flush=True)
    parallel.shutdown()


if __name__ == "__main__":
    main()
