"""Answers for matrix products and row padding, in plain torch.

Sums are in float32 and are rounded once, as cuBLAS does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tests.lab.te_rehearsal.compiled.quantizers import operand, torch_dtype


def generic_gemm(
    left: Any,
    transposes_left: bool,
    right: Any,
    transposes_right: bool,
    out: torch.Tensor | None,
    quantizer: Any,
    output_dtype: Any,
    bias: torch.Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: torch.Tensor | None,
    grad: bool,
    workspace: torch.Tensor,
    workspace_size: int,
    accumulate: bool,
    *rest: Any,
    alpha: float = 1.0,
    **overlap: Any,
) -> list[Any]:
    """Return [op(right) @ op(left), gradient of the bias, None, None].

    The names A and B of cuBLAS are column-major: `left` is A. Raises NotImplementedError for GELU,
    biases, quantized outputs and overlapped communication, which no model here uses.
    """
    if gelu or bias is not None or quantizer is not None or overlap.get("comm_overlap"):
        raise NotImplementedError("GELU, biases, quantized outputs, overlapped communication")
    rows = operand(right, is_rowwise=not transposes_right)
    second = operand(left, is_rowwise=transposes_left)
    product = alpha * _multiply(second, transposes_left, rows, transposes_right)
    if not transposes_right:
        product = product.reshape(*right.shape[:-1], product.shape[-1])
    if out is None:
        dtype = torch_dtype(output_dtype) if output_dtype is not None else left.dtype
        return [product.to(dtype), None, None, None]
    out.copy_(out.float() + product if accumulate else product)
    return [out, None, None, None]


def te_general_grouped_gemm(
    left: Sequence[Any],
    transposes_left: bool,
    right: Sequence[Any],
    transposes_right: bool,
    out: Sequence[torch.Tensor],
    output_type: Any,
    rows_of_groups: Sequence[int],
    bias: Sequence[torch.Tensor],
    bias_type: Any,
    has_single_output: bool,
    gelu_in: Sequence[torch.Tensor],
    grad: bool,
    workspaces: Sequence[torch.Tensor],
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    processors: int,
) -> list[torch.Tensor]:
    """Fill `out` with one product for each group, and return the biases unchanged.

    A group without rows gets zeros, unless it accumulates. Raises ValueError for groups that do
    not fit the output.
    """
    targets = list(out)
    if has_single_output:
        if sum(rows_of_groups) != len(out[0]):
            raise ValueError(f"{sum(rows_of_groups)} rows for an output of {len(out[0])}")
        targets = list(out[0].split(list(rows_of_groups)))
    for one_left, one_right, target in zip(left, right, targets, strict=True):
        rows = operand(one_right, is_rowwise=not transposes_right)
        second = operand(one_left, is_rowwise=transposes_left)
        product = _multiply(second, transposes_left, rows, transposes_right)
        target.copy_(target.float() + product if accumulate else product)
    return list(bias)


def fused_multi_row_padding(
    rows: torch.Tensor, out: torch.Tensor, sizes: Sequence[int], padded_sizes: Sequence[int]
) -> None:
    """Copy each group of rows to its place among zeros."""
    out.zero_()
    parts = rows.split(list(sizes))
    for part, place in zip(parts, out.split(list(padded_sizes)), strict=True):
        place[: len(part)].copy_(part)


def fused_multi_row_unpadding(
    rows: torch.Tensor, out: torch.Tensor, padded_sizes: Sequence[int], sizes: Sequence[int]
) -> None:
    """Copy each group of rows without its padding."""
    parts = rows.split(list(padded_sizes))
    for part, place in zip(parts, out.split(list(sizes)), strict=True):
        place.copy_(part[: len(place)])


def _multiply(
    left: torch.Tensor, transposes_left: bool, right: torch.Tensor, transposes_right: bool
) -> torch.Tensor:
    """Return op(right) @ op(left) in float32."""
    first = right.float().T if transposes_right else right.float()
    second = left.float().T if transposes_left else left.float()
    return first @ second
