"""Answers for RMSNorm (arXiv 1910.07467) and rotary embeddings, in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from tests.lab.te_rehearsal.compiled.quantizers import torch_dtype


def rmsnorm_fwd(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    ln_out: torch.Tensor | None,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Return [output, None, reciprocal root mean squares float32 [rows]]."""
    x = input.float()
    scale = torch.rsqrt(x.square().mean(-1) + eps)
    output = (x * scale[:, None] * _gamma(weight, zero_centered_gamma)).to(torch_dtype(otype))
    if ln_out is not None:
        output = ln_out.copy_(output)
    if quantizer is not None:
        output = quantizer.quantize(output)
    return [output, None, scale]


def rmsnorm_bwd(
    gradient: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[torch.Tensor]:
    """Return the gradients of the input and of the weight."""
    normal = x.float() * scale[:, None]
    scaled_gradient = gradient.float() * _gamma(weight, zero_centered_gamma)
    mean = (scaled_gradient * normal).mean(-1, keepdim=True)
    x_gradient = (scaled_gradient - normal * mean) * scale[:, None]
    weight_gradient = (gradient.float() * normal).sum(0)
    return [x_gradient.to(x.dtype), weight_gradient.to(weight.dtype)]


def fused_rope_forward(
    x: torch.Tensor,
    angles: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    is_interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Rotate the heads of packed sequences, [T, heads, dim], by the angles of their positions.

    angles: float32 [positions, 1, 1, rotation dims].

    Raises NotImplementedError for other layouts and for context parallelism.
    """
    return _rotate(x, angles, qkv_format, is_interleaved, cu_seqlens, cp_size, sign=1.0)


def fused_rope_backward(
    gradient: torch.Tensor,
    angles: torch.Tensor,
    start_positions: torch.Tensor | None,
    qkv_format: Any,
    is_interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> torch.Tensor:
    """Rotate gradients back."""
    return _rotate(gradient, angles, qkv_format, is_interleaved, cu_seqlens, cp_size, sign=-1.0)


def _rotate(
    x: torch.Tensor,
    angles: torch.Tensor,
    qkv_format: Any,
    is_interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    *,
    sign: float,
) -> torch.Tensor:
    if qkv_format.name != "NVTE_THD" or cu_seqlens is None or is_interleaved or cp_size != 1:
        raise NotImplementedError("rotary embeddings of other layouts than packed sequences")
    bounds = cu_seqlens.long()
    rows = torch.arange(len(x))
    sequence = torch.bucketize(rows, bounds[1:], right=True).clamp(max=len(bounds) - 2)
    angle = angles.reshape(len(angles), -1)[rows - bounds[sequence]][:, None]
    size = angle.shape[-1]
    part = x[..., :size].float()
    first, second = part.chunk(2, dim=-1)
    rotation = part * angle.cos() + sign * torch.cat([-second, first], -1) * angle.sin()
    result = x.clone()
    result[..., :size] = rotation.to(x.dtype)
    return result


def _gamma(weight: torch.Tensor, zero_centered_gamma: bool) -> torch.Tensor:
    return weight.float() + 1 if zero_centered_gamma else weight.float()
