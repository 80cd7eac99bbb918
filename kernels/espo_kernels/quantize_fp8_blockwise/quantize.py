"""The public function `quantize_fp8_blockwise`: checks, then one backend."""

from __future__ import annotations

import torch

from espo_kernels.arguments import require_floating
from espo_kernels.backends import Backend, checks_values, resolve_backend
from espo_kernels.quantize_fp8_blockwise.reference import quantize_reference

MAX_BLOCK = 256
"""A Triton program holds its whole block in registers. Larger blocks take minutes to compile."""


def quantize_fp8_blockwise(
    weight: torch.Tensor,
    *,
    block: int = 128,
    power_of_two_scales: bool = False,
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 weights with one scale per block × block square (DeepSeek-V3, arXiv 2412.19437, section
    3.3).

        scale_inv = max |w| over the block / 448
        fp8 = round_to_nearest_even(w / scale_inv)

    so that w ≈ float(fp8) · scale_inv. A code has no rounding error but its own, because the
    division follows IEEE 754. NVIDIA ModelOpt's `FP8QTensor` gives the same bits
    (`tests/kernels/test_quantize_against_modelopt.py`). Blocks at the right and lower edge may be
    smaller. A block of zeros has scale_inv 1. A scale is never below 2^-126.

    Args:
        weight: [..., M, N] float16, bfloat16 or float32. Leading dimensions (stacked experts) are
            quantised together.
        block: side of a block, a power of two from 16 to 256.
        power_of_two_scales: round scale_inv up to a power of two (the UE8M0 scales of some
            engines).

    Returns:
        (fp8[..., M, N] float8_e4m3fn, scale_inv[..., ⌈M/block⌉, ⌈N/block⌉] float32).

    Raises:
        ValueError or TypeError naming the argument. NaN and infinite weights raise on CPU and in
        the reference, and with ESPO_KERNELS_DEBUG=1; otherwise their block's scale_inv is NaN.
    """
    require_floating("weight", weight)
    if weight.dtype == torch.float64:
        raise TypeError("weight has dtype torch.float64: must be float16, bfloat16 or float32")
    if weight.dim() < 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}: must be [..., M, N]")
    if not isinstance(block, int) or not 16 <= block <= MAX_BLOCK or block & (block - 1):
        raise ValueError(
            f"block={block}: must be a power of two from 16 to {MAX_BLOCK}. "
            "FP8 engines load blocks of 128: use 128"
        )
    weight = weight.detach()
    selected_backend = resolve_backend(backend, weight)
    match selected_backend:
        case "triton":
            from espo_kernels.quantize_fp8_blockwise.triton_kernel import quantize_triton

            fp8, scale_inv = quantize_triton(weight.contiguous(), block, power_of_two_scales)
        case "cpu":
            from espo_kernels.quantize_fp8_blockwise.cpu import quantize_cpu

            fp8, scale_inv = quantize_cpu(weight, block, power_of_two_scales)
        case _:
            fp8, scale_inv = quantize_reference(weight, block, power_of_two_scales)
    if checks_values(weight, selected_backend) and not bool(torch.isfinite(scale_inv).all()):
        at = tuple((~torch.isfinite(scale_inv)).nonzero()[0].tolist())
        raise ValueError(f"weight has NaN or infinite entries in block {at}: must be finite")
    return fp8, scale_inv
