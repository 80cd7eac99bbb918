"""What became of the tokens that were generated for a step."""

from __future__ import annotations

from megatron_rl.contracts.plan import StepPlan


def token_usage(generated_tokens: int, plan: StepPlan, applied: int) -> dict[str, float]:
    """How much of what was generated is in the first `applied` optimizer steps of a plan.

    rollout/wasted_token_fraction: the share of generated tokens that ended in no gradient.
    """
    used = (i for step in plan.optimizer_steps[:applied] for rank in step.micro_batches for m in rank for i in m)
    trained = sum(plan.rollouts[i].num_trainable for i in used)
    return {
        "rollout/wasted_token_fraction": 1.0 - trained / generated_tokens if generated_tokens else 0.0,
        "train/samples": float(len(plan.rollouts)),
        "train/optimizer_steps": float(applied),
        "train/micro_batches": float(sum(len(step.micro_batches[0]) for step in plan.optimizer_steps)),
    }
