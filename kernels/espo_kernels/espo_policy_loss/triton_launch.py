"""Launches of the Triton kernels of the loss."""

from __future__ import annotations

import torch
import triton

from espo_kernels.espo_policy_loss.inputs import LossInputs
from espo_kernels.espo_policy_loss.metrics import EspoMetrics
from espo_kernels.espo_policy_loss.triton_kernels import (
    espo_group_sums_kernel,
    espo_reduction_kernel,
    espo_sequence_kernel,
    scale_gradient_kernel,
)

_WIDEST_BLOCK = 4096
_STATISTICS, _METRICS = 10, 9


def loss_triton(
    logprobs: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, EspoMetrics]:
    """(loss, B · ∂loss/∂logprobs [T] float32, 1/B, metrics)."""
    device, tokens, (num_sequences, K) = logprobs.device, logprobs.numel(), inputs.clip.shape
    gradient = torch.zeros(tokens, dtype=torch.float32, device=device)
    statistics = torch.empty(_STATISTICS, K, num_sequences, dtype=torch.float32, device=device)
    signed = torch.empty(num_sequences, dtype=torch.float32, device=device)
    scalars = torch.empty(2, dtype=torch.float32, device=device)
    metrics = torch.empty(_METRICS, K, dtype=torch.float64, device=device)
    masked = inputs.loss_mask is not None
    block = min(_WIDEST_BLOCK, max(128, triton.next_power_of_2(tokens)))
    options = {
        "K": K,
        "PADDED": triton.next_power_of_2(K),
        "MASK": masked,
        "BLOCK": block,
        "num_warps": max(4, block // 256),
    }
    tensors = (logprobs, inputs.old_logprobs, inputs.advantages, inputs.cu_seqlens, inputs.group_id)
    mask = inputs.loss_mask if inputs.loss_mask is not None else inputs.group_id
    grid, partial = (num_sequences,), signed
    if num_sequences and inputs.cp_group is not None:
        partial = torch.empty(num_sequences, 2 * K + 1, dtype=torch.float32, device=device)
        espo_group_sums_kernel[grid](*tensors, mask, partial, tokens, num_sequences, **options)
        partial = inputs.all_reduced(partial)
    if num_sequences:
        espo_sequence_kernel[grid](
            *tensors,
            mask,
            inputs.clip,
            partial,
            gradient,
            statistics,
            signed,
            tokens,
            num_sequences,
            OLD_DENOMINATOR=inputs.ratio_denominator == "old",
            SHARED=inputs.cp_group is not None,
            **options,
        )
    _reduce(statistics, signed, scalars, metrics, inputs)
    return scalars[0], gradient, scalars[1], EspoMetrics(*metrics)


def _reduce(
    statistics: torch.Tensor,
    signed: torch.Tensor,
    scalars: torch.Tensor,
    metrics: torch.Tensor,
    inputs: LossInputs,
) -> None:
    _, K, num_sequences = statistics.shape
    B = inputs.num_sequences
    is_tensor = isinstance(B, torch.Tensor)
    espo_reduction_kernel[(1,)](
        statistics,
        signed,
        B if is_tensor else signed,
        1.0 if B is None or is_tensor else float(B),
        scalars,
        scalars[1:],
        metrics,
        num_sequences,
        1.0 if inputs.counts_groups else 0.0,
        GIVEN="counted" if B is None else "tensor" if is_tensor else "value",
        K=K,
        BLOCK=128,
    )


def scale_triton(
    gradient: torch.Tensor, grad_loss: torch.Tensor, inverse_B: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """gradient · grad_loss / B in `dtype`, one launch."""
    out = torch.empty_like(gradient, dtype=dtype)
    block = 1024
    if gradient.numel():
        scale_gradient_kernel[(triton.cdiv(gradient.numel(), block),)](
            gradient, grad_loss, inverse_B, out, gradient.numel(), BLOCK=block
        )
    return out
