"""Compute verl's published losses of padded batches, with their gradients, in a separate process.

Usage: verl_losses.py BATCHES OUT. Both files hold dictionaries that `torch.load(weights_only=True)`
reads: BATCHES {name: {logprobs, old_logprobs, advantages, mask: [B, L] float64, clip: float,
objective: "gspo" | "vanilla"}}, OUT {name: {loss: scalar, gradient: [B, L]}}.
"""

import sys
from typing import Any

import torch
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

FUNCTIONS = {
    "gspo": core_algos.compute_policy_loss_gspo,
    "vanilla": core_algos.compute_policy_loss_vanilla,
}


def evaluate(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=batch["clip"],
        clip_ratio_low=batch["clip"],
        clip_ratio_high=batch["clip"],
    )
    logprobs = batch["logprobs"].requires_grad_()
    loss, _ = FUNCTIONS[batch["objective"]](
        old_log_prob=batch["old_logprobs"],
        log_prob=logprobs,
        advantages=batch["advantages"],
        response_mask=batch["mask"],
        loss_agg_mode="seq-mean-token-mean",
        config=config,
    )
    loss.backward()
    return {"loss": loss.detach(), "gradient": logprobs.grad}


def main() -> None:
    batches = torch.load(sys.argv[1], weights_only=True)
    torch.save({name: evaluate(batch) for name, batch in batches.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
