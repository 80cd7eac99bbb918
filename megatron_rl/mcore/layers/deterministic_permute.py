"""Moves tokens to their experts and back with additions in a fixed order.

On GPUs Megatron's own additions are atomic and happen in any order. Two passes over the same
weights and tokens then differ in their last bits. In bfloat16 that difference exceeds a clip range
of 3e-4.

These functions sum the expert outputs of each token. Every token has the same number of experts,
because no token is dropped, and the all-to-all dispatcher returns each token to its source rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Permute = Callable[..., tuple[Any, ...]]
Unpermute = Callable[..., torch.Tensor]


class _ToExperts(torch.autograd.Function):
    """tokens [T, hidden] -> rows [T * topk, hidden], where row i is token sources[i]."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(sources)
        ctx.tokens = len(tokens)
        return tokens.index_select(0, sources)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (sources,) = ctx.saved_tensors
        return _sum_by_token(gradient, sources, ctx.tokens), None


class _FromExperts(torch.autograd.Function):
    """rows [T * topk, hidden] -> sums [T, hidden]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sources: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.save_for_backward(sources)
        return _sum_by_token(rows, sources, tokens)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (sources,) = ctx.saved_tensors
        return gradient.index_select(0, sources), None, None


def _sum_by_token(rows: torch.Tensor, sources: torch.Tensor, tokens: int) -> torch.Tensor:
    """Sum the rows of each token in the order of its experts, in float32 or wider."""
    order = sources.argsort(stable=True)
    return rows.index_select(0, order).view(tokens, -1, rows.shape[1]).sum(1)


def deterministic_permute(permute: Permute) -> Permute:
    """Wrap Megatron's `permute`, so that its backward pass adds in a fixed order.

    The result has the same arguments and returns the rows [T * topk, hidden], their probabilities,
    their source tokens, and what `permute` returns beside them. Fused kernels and dropped tokens
    are left to `permute` itself.
    """

    def permute_tokens(
        tokens: torch.Tensor,
        routing_map: torch.Tensor,
        *,
        fused: bool = False,
        drop_and_pad: bool = False,
        **rest: Any,
    ) -> tuple[Any, ...]:
        if fused or drop_and_pad or not len(tokens):
            return permute(tokens, routing_map, fused=fused, drop_and_pad=drop_and_pad, **rest)
        # One column of the tokens suffices to find the order. The probabilities keep the autograd
        # graph that Megatron builds.
        _, probs, sources, *others = permute(tokens.detach()[:, :1], routing_map, **rest)
        return _ToExperts.apply(tokens, sources), probs, sources, *others

    return permute_tokens


def deterministic_unpermute(unpermute: Unpermute) -> Unpermute:
    """Wrap Megatron's `unpermute`, so that it adds in a fixed order.

    The result has the same arguments and returns the sums [T, hidden]. Fused kernels, dropped
    tokens and probabilities are left to `unpermute` itself.
    """

    def unpermute_rows(
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
            options = {"probs": probs, "fused": fused, "drop_and_pad": drop_and_pad}
            return unpermute(permuted_tokens, sorted_indices, restore_shape, **options, **rest)
        output: torch.Tensor = _FromExperts.apply(permuted_tokens, sorted_indices, restore_shape[0])
        return output

    return unpermute_rows
