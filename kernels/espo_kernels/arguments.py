"""Checks that every operation makes on its arguments, before any backend sees them."""

from __future__ import annotations

import torch

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def require_floating(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS:
        raise TypeError(
            f"{name} has dtype {tensor.dtype}: must be one of float16, bfloat16, float32, float64"
        )


def require_integers(name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{name} has dtype {tensor.dtype}: must be an integer dtype")


def require_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...], like: str) -> None:
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: must be {shape} to match {like}")


def require_one_device(**tensors: torch.Tensor | None) -> None:
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        locations = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"arguments are on different devices ({locations}): move them to one")


def require_packed(tokens_name: str, tokens: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    """`tokens` is [T] and `cu_seqlens` is [B + 1] integers; tokens need a sequence."""
    if tokens.dim() != 1:
        raise ValueError(
            f"{tokens_name} has shape {tuple(tokens.shape)}: must be [T], packed tokens"
        )
    require_integers("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(
            f"cu_seqlens has shape {tuple(cu_seqlens.shape)}: must be [B + 1], starting with 0"
        )
    if cu_seqlens.numel() == 1 and tokens.numel():
        raise ValueError(
            f"cu_seqlens has shape (1,): names no sequence for the {tokens.numel()} tokens of "
            f"{tokens_name}"
        )


def require_mask(loss_mask: torch.Tensor | None, num_tokens: int, like: str) -> None:
    if loss_mask is None:
        return
    if loss_mask.dtype != torch.bool and loss_mask.dtype not in INTEGERS:
        raise TypeError(
            f"loss_mask has dtype {loss_mask.dtype}: must be bool (or integers, zero for masked)"
        )
    require_shape("loss_mask", loss_mask, (num_tokens,), like)


def require_cu_seqlens_values(cu_seqlens: torch.Tensor, num_tokens: int) -> None:
    """cu_seqlens rises from 0 to T without decreasing. Reads values."""
    first = int(cu_seqlens[0])
    last = int(cu_seqlens[-1])
    if first != 0 or last != num_tokens:
        raise ValueError(
            f"cu_seqlens runs from {first} to {last}: must run from 0 to {num_tokens}, the tokens"
        )
    falls = (cu_seqlens[1:] < cu_seqlens[:-1]).nonzero()
    if falls.numel():
        at = int(falls[0]) + 1
        raise ValueError(
            f"cu_seqlens[{at}] = {int(cu_seqlens[at])} is below the entry before it: "
            "must not decrease"
        )


def require_finite(name: str, tensor: torch.Tensor, keep: torch.Tensor | None = None) -> None:
    """No NaN and no infinity among the kept entries. Reads values."""
    bad = ~torch.isfinite(tensor)
    if keep is not None:
        bad &= keep
    where = bad.nonzero()
    if where.numel():
        at = int(where[0, 0])
        raise ValueError(
            f"{name}[{at}] is {float(tensor[at])}: must be finite on every token that is not masked"
        )
