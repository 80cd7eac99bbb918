"""Log-probabilities of the old-policy pass and of the first update of one batch.

A token has eight experts, because with two experts every order of summation gives the same sum.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch

from megatron_rl.config.algorithms import GrpoSettings
from megatron_rl.config.schema import ModelSettings, ParallelSettings, RolloutSettings
from megatron_rl.losses.grpo import Grpo
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
from tests.support.batches import make_batch
from tests.support.policies import ADAM, ASSETS, make_batcher, make_planner

GRID = ParallelSettings(timeout_s=60)
REPEATS = 4


# Latent attention in the sizes of DeepSeek-V3: values are narrower than keys.
_LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MODELS: dict[str, dict[str, Any]] = {"qwen3_moe": {"num_experts": 16}, "deepseek_v3": _LATENT}


def write_model(directory: Path, family: str) -> None:
    """Write config.json of a tiny model with eight experts a token."""
    config = json.loads((ASSETS / "qwen3_moe_tiny_blank" / "config.json").read_text())
    config |= {"num_experts_per_tok": 8} | MODELS[family]
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


def build(directory: Path, dtype: str, spec: str) -> tuple[ModelShape, Policy]:
    """Build the policy with random weights."""
    shape = read_shape(directory)
    options: dict[str, Any] = {"init": "random", "dtype": dtype, "spec": spec}
    settings = ModelSettings(path=str(directory), **options)
    models = wrap_data_parallel(build_models(shape, settings, GRID))
    logprobs = ResponseLogprobs(
        RolloutSettings(max_new_tokens=32),
        vocab_size=shape.vocab_size,
        tp_group=None,
    )
    loss = Grpo(GrpoSettings())
    return shape, Policy(models=models, logprobs=logprobs, loss=loss, replay=RouteReplay(models))


def run(layout: RankLayout, directory: Path, dtype: str, spec: str) -> dict[str, float | bool]:
    """Repeat the old-policy pass, then apply two updates.

    Returns whether all old-policy passes were equal (`same`), the largest deviation of a first
    ratio from 1 (`deviation`), the largest ratio of the second update minus 1 (`ratio_change`),
    and the number of micro-batches (`batches`).
    """
    shape, policy = build(directory, dtype, spec)
    refs, rollouts, advantages = make_batch(shape, 24)
    by_id = {rollout.rollout_id: rollout for rollout in rollouts}
    plan = make_planner(GRID, layout, tokens_per_micro_batch=256).plan(0, refs, advantages)
    by_index = {i: by_id[ref.rollout_id] for i, ref in enumerate(plan.rollouts)}
    (batches,) = make_batcher(shape, GRID, layout).optimizer_steps(plan, 0, by_index)
    passes = [compute_old_policy(policy, batches, MetricSums()) for _ in range(REPEATS)]
    is_same = all(_are_equal(passes[0], repeat) for repeat in passes[1:])
    metrics = MetricSums()
    optimizer = DistributedAdam(policy.models, ADAM, total_steps=10)
    for first_step in (True, False):
        update_policy(
            policy,
            optimizer,
            batches,
            passes[0],
            plan.optimizer_steps[0].denominators,
            dp_size=1,
            first_step=first_step,
            metrics=metrics,
        )
    values = metrics.values()
    return {
        "same": is_same,
        "deviation": values["policy/first_ratio_deviation"],
        "ratio_change": values["policy/ratio_max"] - 1,
        "batches": len(batches),
    }


def _are_equal(objectives: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(
        torch.equal(objective.old_logprobs, other.old_logprobs)
        for objective, other in zip(objectives, others, strict=True)
    )
