"""Block-FP8 weights: what is sent, and what SGLang's checksums see.

A weight X comes as two tensors: X holds e4m3 codes [M, N], and X_scale_inv float32 scales, one for
each block of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
CODES_SUFFIX = ":codes"
"""Follows the name of a parameter where a CPU engine lists the checksum of its codes."""


class Part(NamedTuple):
    """Contribution of a tensor to the checksum of one parameter.

    name: the tensor's. weight: the one whose slot it takes. suffix: follows the parameter's name.
    dtype: of the hashed values, None for the engine's.
    """

    name: str
    weight: str
    suffix: str
    tensor: torch.Tensor
    dtype: torch.dtype | None = None


class Fp8Pairs:
    """Joins the codes and scales of a stream, in which either may come first.

    lists_exactly: the engine lists checksums of codes and scales too, not only of their values.
    compares_values: False if names alone are needed. Then nothing is copied or computed.
    """

    def __init__(self, *, lists_exactly: bool, compares_values: bool = True) -> None:
        self._lists_exactly = lists_exactly
        self._compares_values = compares_values
        self._waiting: dict[str, torch.Tensor] = {}

    def parts(self, name: str, tensor: torch.Tensor) -> Iterator[Part]:
        """Yield the parts that are complete with this tensor. The first half of a pair is copied.

        Raises `ValueError` for FP8 numbers without the shape of a matrix and its scales.
        """
        is_scale = name.endswith(SCALE_SUFFIX)
        if not is_scale and tensor.dtype != torch.float8_e4m3fn:
            yield Part(name, name, "", tensor)
            return
        weight = name.removesuffix(SCALE_SUFFIX)
        if not self._compares_values:
            yield from self._names(weight, tensor, is_scale=is_scale)
            return
        partner = self._waiting.pop(weight if is_scale else weight + SCALE_SUFFIX, None)
        if partner is None:
            self._waiting[name] = tensor.clone()
            return
        codes, scales = (partner, tensor) if is_scale else (tensor, partner)
        _require_fitting(weight, codes, scales)
        values = dequantize(codes, scales, torch.bfloat16)
        yield Part(weight, weight, "", values, torch.bfloat16)
        if self._lists_exactly:
            bits = codes.contiguous().view(torch.uint8)
            yield Part(weight, weight, CODES_SUFFIX, bits, torch.uint8)
            yield Part(weight + SCALE_SUFFIX, weight, SCALE_SUFFIX, scales, torch.float32)

    def _names(self, weight: str, tensor: torch.Tensor, *, is_scale: bool) -> Iterator[Part]:
        if not is_scale:
            yield Part(weight, weight, "", tensor)
        if self._lists_exactly:
            suffix = SCALE_SUFFIX if is_scale else CODES_SUFFIX
            yield Part(weight + SCALE_SUFFIX if is_scale else weight, weight, suffix, tensor)

    @property
    def gaps(self) -> list[str]:
        """The tensors whose partner has not come."""
        return [
            f"{name} has no scales" if not name.endswith(SCALE_SUFFIX) else f"{name} has no weight"
            for name in self._waiting
        ]


def dequantize(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the matrix [M, N] that codes and scales stand for, rounded once to a dtype."""
    rows, columns = codes.shape
    row_scales = scales.repeat_interleave(BLOCK, 0)[:rows]
    return (codes.float() * row_scales.repeat_interleave(BLOCK, 1)[:, :columns]).to(dtype)


def _require_fitting(weight: str, codes: torch.Tensor, scales: torch.Tensor) -> None:
    scale_shape = tuple(-(-size // BLOCK) for size in codes.shape)
    if codes.dtype != torch.float8_e4m3fn or scales.dtype != torch.float32:
        raise ValueError(
            f"weight {weight}: its codes are {codes.dtype} and its scales {scales.dtype}; expected "
            "float8_e4m3fn and float32"
        )
    if tuple(scales.shape) != scale_shape:
        raise ValueError(
            f"weight {weight}: its scales have the shape {tuple(scales.shape)} instead of "
            f"{scale_shape}"
        )
