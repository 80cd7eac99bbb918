"""Answers for operations over lists of tensors, and for Apex's accumulation, in plain torch."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from collections.abc import Sequence

import torch

APEX_ACCUMULATION = "fused_weight_gradient_mlp_cuda"
Lists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_adam(
    chunk_size: int,
    skip: torch.Tensor,
    lists: Lists,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    decouples_decay: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Update parameters in place. lists: gradients, parameters, first and second moments."""
    if skip.item():
        return
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for gradient, param, mean, square in zip(*lists, strict=True):
        values = param.float()
        slope = gradient.float()
        if not decouples_decay:
            slope = slope + weight_decay * values
        mean.copy_(beta1 * mean.float() + (1 - beta1) * slope)
        square.copy_(beta2 * square.float() + (1 - beta2) * slope.square())
        update = mean.float() / correction1 / ((square.float() / correction2).sqrt() + eps)
        if decouples_decay:
            update = update + weight_decay * values
        param.copy_(values - lr * update)


def multi_tensor_l2norm(
    chunk_size: int, skip: torch.Tensor, lists: Lists, per_tensor: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm over all tensors, float32 [1], and with `per_tensor` the norm of each."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else norms.new_empty(0)


def multi_tensor_scale(chunk_size: int, skip: torch.Tensor, lists: Lists, scale: float) -> None:
    """Copy the first list, scaled, into the second. Marks NaN and Inf in `skip`."""
    for source, target in zip(*lists, strict=True):
        if not source.isfinite().all():
            skip.fill_(1)
        target.copy_(source.float() * scale)


def accumulate_weight_gradient(
    rows: torch.Tensor, gradient: torch.Tensor, main_gradient: torch.Tensor
) -> None:
    """Add the gradient of a weight to its sum, float32 [N, K]. rows: [M, K]. gradient: [M, N]."""
    product = gradient.reshape(-1, gradient.shape[-1]).float().T
    main_gradient.add_(product @ rows.reshape(-1, rows.shape[-1]).float())


def provide_apex_accumulation() -> None:
    """Make Apex's module importable, which the CUDA image has, before Megatron looks for it."""
    module = types.ModuleType(APEX_ACCUMULATION)
    module.__spec__ = importlib.machinery.ModuleSpec(APEX_ACCUMULATION, None)
    vars(module)["wgrad_gemm_accum_fp32"] = accumulate_weight_gradient
    sys.modules[APEX_ACCUMULATION] = module
