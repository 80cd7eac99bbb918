"""Tokens to their experts and back, adding in one order: on GPUs Megatron's own additions are
atomic, in any order.

With them two passes over the same weights and tokens differ in their last bits, and in bfloat16 a
clip width of 3e-4 is below that. What is added here is each token's share of its experts, which are
equally many for every token: nothing is dropped, and the all-to-all dispatcher brings every token
back to where it came from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Permute = Callable[..., tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]
Unpermute = Callable[..., torch.Tensor]


class _ToExperts(torch.autograd.Function):
    """tokens [T, hidden] -> rows [T * topk, hidden], row i of token sources[i]."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sources)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, sources)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (sources,) = ctx.saved_tensors
        return _sum_of_each(gradient, sources, ctx.tokens), None


class _FromExperts(torch.autograd.Function):
    """rows [T * topk, hidden] -> sums [T, hidden]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sources: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.save_for_backward(sources)
        return _sum_of_each(rows, sources, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (sources,) = ctx.saved_tensors
        return gradient.index_select(0, sources), None, None


def _sum_of_each(rows: torch.Tensor, sources: torch.Tensor, tokens: int) -> torch.Tensor:
    """The sum of each token's rows, by expert, accumulated in float32 at least."""
    order = sources.argsort(stable=True)
    return rows.index_select(0, order).view(tokens, -1, rows.shape[1]).sum(1)


def ordered_permute(permute: Permute) -> Permute:
    """Megatron's `permute`, whose gradient is added in one order."""

    def ordered(
        tokens: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        fused: bool = False,
        drop_and_pad: bool = False,
        **rest: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        if fused or drop_and_pad or not len(tokens):
            return permute(tokens, routing_map, fused=fused, drop_and_pad=drop_and_pad, **rest)
        # of the tokens themselves one column is enough to learn the order, and the probabilities'
        # own graph is kept
        _, probs, sources = permute(tokens.detach()[:, :1], routing_map, **rest)
        return _ToExperts.apply(tokens, sources), probs, sources

    return ordered


def ordered_unpermute(unpermute: Unpermute) -> Unpermute:
    """Megatron's `unpermute`, adding in one order."""

    def ordered(
        permuted_tokens: torch.Tensor,
        sorted_indices: torch.Tensor,
        restore_shape: torch.Size,
        *,
        probs: torch.Tensor | None = None,
        fused: bool = False,
        drop_and_pad: bool = False,
        **rest: Any,
    ) -> torch.Tensor:
        if fused or drop_and_pad or probs is not None or not restore_shape[0]:
            given = {"probs": probs, "fused": fused, "drop_and_pad": drop_and_pad}
            return unpermute(permuted_tokens, sorted_indices, restore_shape, **given, **rest)
        out: torch.Tensor = _FromExperts.apply(permuted_tokens, sorted_indices, restore_shape[0])
        return out

    return ordered
