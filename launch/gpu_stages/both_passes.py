"""Under torchrun: old-policy pass and first update of one batch; prints how far their
log-probabilities are apart.

Usage: both_passes.py DIRECTORY DTYPE. Eight experts add up in each token: the order of two would
not show.
"""

import json
import sys
from pathlib import Path

from megatron_rl.mcore import compat

compat.install()

import torch

from launch.testbed.batches import make_batch
from launch.testbed.policies import ADAM, ASSETS, make_batcher, make_planner, train_settings
from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ModelSettings, ParallelSettings, RolloutSettings
from megatron_rl.losses.grpo import Grpo
from megatron_rl.mcore import parallel
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.optimizer import DistributedAdam, wrap_data_parallel
from megatron_rl.mcore.parallel import RankLayout
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.metric_sums import MetricSums
from megatron_rl.training.old_policy import compute_old_policy
from megatron_rl.training.policy import Policy
from megatron_rl.training.update import update_policy

GRID = ParallelSettings(timeout_s=60)
REPEATS = 4


def write_model(directory: Path) -> None:
    config = json.loads((ASSETS / "qwen3_moe_tiny_blank" / "config.json").read_text())
    config |= {"num_experts": 16, "num_experts_per_tok": 8}
    (directory / "config.json").write_text(json.dumps(config))


def build(directory: Path, dtype: str) -> tuple[ModelShape, Policy]:
    shape = read_shape(directory)
    settings = ModelSettings(path=str(directory), init="random", dtype=dtype)  # type: ignore[arg-type]
    models = wrap_data_parallel(build_models(shape, settings, GRID))
    logprobs = ResponseLogprobs(
        train_settings(),
        RolloutSettings(max_new_tokens=32),
        vocab_size=shape.vocab_size,
        tp_group=None,
    )
    return shape, Policy(
        models=models, logprobs=logprobs, loss=Grpo(GrpoSettings()), replay=RouteReplay(models)
    )


def run(layout: RankLayout, directory: Path, dtype: str) -> dict[str, float | bool]:
    shape, policy = build(directory, dtype)
    refs, rollouts, advantages = make_batch(shape, 24)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    plan = make_planner(GRID, layout, tokens_per_micro_batch=256).plan(0, refs, advantages)
    own = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    (batches,) = make_batcher(shape, GRID, layout).optimizer_steps(plan, 0, own)
    passes = [compute_old_policy(policy, batches, MetricSums()) for _ in range(REPEATS)]
    same = all(
        torch.equal(first.old_logprobs, other.old_logprobs)
        for again in passes[1:]
        for first, other in zip(passes[0], again, strict=True)
    )
    metrics, optimizer = MetricSums(), DistributedAdam(policy.models, ADAM, total_steps=10)
    for first_step in (True, False):
        counts = plan.optimizer_steps[0].denominators
        update_policy(
            policy,
            optimizer,
            batches,
            passes[0],
            counts,
            dp_size=1,
            first_step=first_step,
            metrics=metrics,
        )
    values = metrics.values()
    moved = values["policy/ratio_max"] - 1  # of the second step: the weights have changed
    return {
        "same": same,
        "deviation": values["policy/first_ratio_deviation"],
        "moved": moved,
        "batches": len(batches),
    }


if __name__ == "__main__":
    where = Path(sys.argv[1])
    write_model(where)
    result = run(parallel.initialize(GRID, seed=0), where, sys.argv[2])
    print(f"RESULT {json.dumps(result)}", flush=True)
    parallel.shutdown()
