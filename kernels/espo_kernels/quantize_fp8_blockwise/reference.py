"""Block quantisation in plain torch."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

FP8_MAX = 448.0
"""Largest finite e4m3 value."""
SMALLEST_SCALE = 2.0**-126
"""Smallest normal float32: below it a scale would lose bits, or vanish and divide by zero."""


def quantize_reference(
    weight: torch.Tensor, block: int, power_of_two_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8[..., M, N] float8_e4m3fn, scale_inv[..., ⌈M/block⌉, ⌈N/block⌉] float32)."""
    *stack, M, N = weight.shape
    rows = -(-M // block)
    columns = -(-N // block)
    padded_weight = pad(weight.float(), (0, columns * block - N, 0, rows * block - M))
    blocks = padded_weight.view(*stack, rows, block, columns, block)
    scale_inv = block_scale(blocks.abs().amax(dim=(-3, -1)), power_of_two_scales)
    quotients = blocks / scale_inv[..., :, None, :, None]
    fp8 = quotients.to(torch.float8_e4m3fn).view(*stack, rows * block, columns * block)
    return fp8[..., :M, :N].contiguous(), scale_inv


def block_scale(amax: torch.Tensor, power_of_two_scales: bool) -> torch.Tensor:
    """amax / 448, with `power_of_two_scales` rounded up to a power of two.

    1 for a block of zeros; NaN where amax is not finite.
    """
    # CUDA would multiply by 1 / 448 if the divisor were a number, and round twice.
    scale = (amax / torch.full_like(amax, FP8_MAX)).clamp_min(SMALLEST_SCALE)
    if power_of_two_scales:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)
