"""CPU path of the ESPO loss: two compiled passes over the tokens, the gradient written out."""

from __future__ import annotations

import torch

from espo_kernels.espo_policy_loss.inputs import LossInputs
from espo_kernels.espo_policy_loss.metrics import EspoMetrics
from espo_kernels.espo_policy_loss.numba_loops import (
    EPSILON_SUM,
    GROUPS,
    sequence_sums,
    token_terms,
)


def loss_cpu(
    logprobs: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, EspoMetrics]:
    """(loss, B · ∂loss/∂logprobs [T] float32, 1/B, metrics) for CPU tensors."""
    num_sequences, K = inputs.clip.shape
    tokens = [
        tensor.float().numpy() for tensor in (logprobs, inputs.old_logprobs, inputs.advantages)
    ]
    layout = (inputs.cu_seqlens.numpy(), inputs.group_id.numpy())
    sums = torch.zeros(num_sequences, 2 * K + 1, dtype=torch.float64)
    sequence_sums(*tokens, *layout, sums.numpy())
    sums = inputs.all_reduced(sums)

    gradient = torch.zeros(logprobs.numel(), dtype=torch.float32)
    statistics = torch.zeros(9, K, dtype=torch.float64)
    objective = token_terms(
        *tokens,
        *layout,
        inputs.clip.double().numpy(),
        sums.numpy(),
        inputs.ratio_denominator == "old",
        gradient.numpy(),
        statistics.numpy(),
    )
    if not inputs.counts_groups:
        statistics[[GROUPS, EPSILON_SUM]] = 0
    inverse_B = torch.as_tensor(1 / inputs.denominator(sums[:, 2 * K]), dtype=torch.float64)
    return (-objective * inverse_B).float(), gradient, inverse_B, EspoMetrics(*statistics)


def scale_cpu(
    gradient: torch.Tensor, grad_loss: torch.Tensor, inverse_B: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """gradient · grad_loss / B in `dtype`."""
    return (gradient * (grad_loss * inverse_B)).to(dtype)
