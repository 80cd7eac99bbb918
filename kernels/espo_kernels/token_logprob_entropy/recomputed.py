"""The autograd node shared by the fast backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from espo_kernels.token_logprob_entropy.vocabulary import TokenStatistics, VocabularyShard

Forward = Callable[[torch.Tensor, torch.Tensor, VocabularyShard], TokenStatistics]
Backward = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        TokenStatistics,
        torch.Tensor,
        torch.Tensor | None,
        VocabularyShard,
        bool,
    ],
    torch.Tensor,
]


class BackendKernels(NamedTuple):
    """Passes over contiguous logits.

    forward(logits, targets, shard); backward(logits, targets, statistics, ∂logprob, ∂entropy,
    shard, inplace), which returns ∂logits, in a tensor of its own unless inplace.
    """

    forward: Forward
    backward: Backward


class RecomputedLogprobEntropy(torch.autograd.Function):
    """(logprob[T], entropy[T]) of logits[T, V]; see `token_logprob_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        targets: torch.Tensor,
        shard: VocabularyShard,
        kernels: BackendKernels,
        entropy_grad: bool,
        inplace: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = logits if logits.is_contiguous() else logits.contiguous()
        statistics = kernels.forward(rows, targets, shard)
        # A contiguous copy is ours alone: keep the caller's tensor, whose version autograd watches,
        # and copy again.
        ctx.save_for_backward(logits, targets, *statistics)
        ctx.shard = shard
        ctx.kernels = kernels
        ctx.entropy_grad = entropy_grad
        ctx.inplace = inplace
        if not entropy_grad:
            ctx.mark_non_differentiable(statistics.entropy)
            ctx.set_materialize_grads(False)  # zeros for the entropy would be one more launch
        return statistics.logprob, statistics.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_logprob: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[Any, ...]:
        logits, targets, *statistics = ctx.saved_tensors
        rows = logits if logits.is_contiguous() else logits.contiguous()
        inplace = ctx.inplace and rows is logits
        gradient = ctx.kernels.backward(
            rows.detach(),
            targets,
            TokenStatistics(*statistics),
            grad_logprob.contiguous(),
            grad_entropy.contiguous() if ctx.entropy_grad else None,
            ctx.shard,
            inplace,
        )
        if inplace:
            torch.autograd.graph.increment_version(logits)
        return gradient, None, None, None, None, None
