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
from espo_kernels.triton_launches import launch

_BLOCK = 4096
"""Tokens of a sequence at a time: one size, so that no batch needs a kernel of its own."""
_STATISTICS = 10
_METRICS = 9


def loss_triton(
    logprobs: torch.Tensor, inputs: LossInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, EspoMetrics]:
    """(loss, B · ∂loss/∂logprobs [T] float32, 1/B, metrics)."""
    device = logprobs.device
    tokens = logprobs.numel()
    num_sequences, K = inputs.clip.shape
    gradient = torch.empty(tokens, dtype=torch.float32, device=device)
    statistics = torch.empty(_STATISTICS, K, num_sequences, dtype=torch.float32, device=device)
    has_advantage = torch.empty(num_sequences, dtype=torch.float32, device=device)
    scalars = torch.empty(2, dtype=torch.float32, device=device)
    metrics = torch.empty(_METRICS, K, dtype=torch.float64, device=device)
    if num_sequences:
        tensors = _kernel_tensors(logprobs, inputs)
        options = _launch_options(K, has_mask=inputs.loss_mask is not None)
        partial = has_advantage
        if inputs.cp_group is not None:
            partial = _reduced_group_sums(tensors, inputs, options)
        launch(
            espo_sequence_kernel,
            (num_sequences,),
            *tensors,
            inputs.clip,
            partial,
            gradient,
            statistics,
            has_advantage,
            tokens,
            num_sequences,
            OLD_DENOMINATOR=inputs.ratio_denominator == "old",
            SHARED=inputs.cp_group is not None,
            **options,
        )
    _reduce(statistics, has_advantage, scalars, metrics, inputs)
    return scalars[0], gradient, scalars[1], EspoMetrics(*metrics)


def _kernel_tensors(logprobs: torch.Tensor, inputs: LossInputs) -> tuple[torch.Tensor, ...]:
    """The first arguments of both sequence kernels; the mask is unread without MASK."""
    mask = inputs.loss_mask if inputs.loss_mask is not None else inputs.group_id
    return (
        logprobs,
        inputs.old_logprobs,
        inputs.advantages,
        inputs.cu_seqlens,
        inputs.group_id,
        mask,
    )


def _launch_options(K: int, *, has_mask: bool) -> dict[str, int | bool]:
    return {
        "K": K,
        "PADDED": triton.next_power_of_2(K),
        "MASK": has_mask,
        "BLOCK": _BLOCK,
        "num_warps": _BLOCK // 256,
    }


def _reduced_group_sums(
    tensors: tuple[torch.Tensor, ...], inputs: LossInputs, options: dict[str, int | bool]
) -> torch.Tensor:
    """[B, 2K + 1] sums of each sequence over the context-parallel ranks."""
    logprobs = tensors[0]
    num_sequences, K = inputs.clip.shape
    partial = torch.empty(num_sequences, 2 * K + 1, dtype=torch.float32, device=logprobs.device)
    launch(
        espo_group_sums_kernel,
        (num_sequences,),
        *tensors,
        partial,
        logprobs.numel(),
        num_sequences,
        **options,
    )
    return inputs.all_reduced(partial)


def _reduce(
    statistics: torch.Tensor,
    has_advantage: torch.Tensor,
    scalars: torch.Tensor,
    metrics: torch.Tensor,
    inputs: LossInputs,
) -> None:
    _, K, num_sequences = statistics.shape
    B = inputs.num_sequences
    is_tensor = isinstance(B, torch.Tensor)
    source = "counted"
    if B is not None:
        source = "tensor" if is_tensor else "value"
    launch(
        espo_reduction_kernel,
        (1,),
        statistics,
        has_advantage,
        B if is_tensor else has_advantage,
        1.0 if B is None or is_tensor else float(B),
        scalars,
        scalars[1:],
        metrics,
        num_sequences,
        1.0 if inputs.counts_groups else 0.0,
        DENOMINATOR=source,
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
        launch(
            scale_gradient_kernel,
            (triton.cdiv(gradient.numel(), block),),
            gradient,
            grad_loss,
            inverse_B,
            out,
            gradient.numel(),
            BLOCK=block,
        )
    return out
