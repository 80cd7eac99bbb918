"""Gathers per-token values from context-parallel ranks into whole sequences."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class WholeSequences(torch.autograd.Function):
    """[k, R] of this rank -> [k, num_tokens] of all ranks of `group`, float32.

    Each token is computed by one rank.

    places: int64 [R], the tokens that this rank computed.

    All ranks compute the same loss of whole sequences. A rank has the gradient of its own tokens.
    The sum over the ranks, which data parallelism computes, is the gradient of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        local_values: torch.Tensor,
        places: torch.Tensor,
        num_tokens: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        values = local_values.new_zeros(local_values.shape[0], num_tokens)
        values[:, places] = local_values
        dist.all_reduce(values, group=group)  # exact, because the other ranks add zeros
        return values

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[:, places], None, None, None
