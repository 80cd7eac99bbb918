"""The reference policy: log-probabilities under the frozen weights of the KL penalty."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_rl.mcore.schedule import run_schedule
from megatron_rl.training.micro_batches import MicroBatch
from megatron_rl.training.policy import Policy


def compute_reference_logprobs(
    policy: Policy, steps: Sequence[Sequence[MicroBatch]]
) -> list[torch.Tensor]:
    """Return the reference's log-probabilities of every micro-batch, [T] each (a collective).

    The pass replays the routes of the micro-batches, which the update replays too: those that the
    engines or the trainer recorded. Without replay the reference's routers choose.

    steps: the micro-batches of every optimizer step, with the routes of the update.

    Returns an empty list unless this rank is of the last pipeline stage.
    """
    assert policy.reference is not None
    batches = [batch for step in steps for batch in step]

    def keep_logprobs(logits: torch.Tensor, index: int) -> tuple[None, torch.Tensor]:
        return None, policy.logprobs(logits, batches[index])[0].detach()

    with policy.reference.exchange():
        return run_schedule(
            policy.models,
            [batch.inputs for batch in batches],
            keep_logprobs,
            forward_only=True,
            replay=policy.replay,
        )
