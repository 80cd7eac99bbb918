"""CPU path: the reference, one band of blocks at a time."""

from __future__ import annotations

import torch

from espo_kernels.quantize_fp8_blockwise.reference import quantize_reference


def quantize_cpu(
    weight: torch.Tensor, block: int, power_of_two_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `quantize_reference`."""
    *stack, M, N = weight.shape
    rows = -(-M // block)
    columns = -(-N // block)
    fp8 = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scale_inv = torch.empty(*stack, rows, columns, dtype=torch.float32)
    if weight.numel() == 0:  # nothing to view as matrices
        return fp8, scale_inv
    matrices = zip(
        weight.reshape(-1, M, N), fp8.view(-1, M, N), scale_inv.view(-1, rows, columns), strict=True
    )
    for matrix, its_fp8, its_scales in matrices:
        for row in range(rows):
            band = slice(row * block, (row + 1) * block)
            its_fp8[band], its_scales[row : row + 1] = quantize_reference(
                matrix[band], block, power_of_two_scales
            )
    return fp8, scale_inv
