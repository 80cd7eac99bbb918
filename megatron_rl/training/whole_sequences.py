"""Context parallelism gives each rank some tokens of every sequence; here what they computed
becomes whole again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


class WholeSequences(torch.autograd.Function):
    """[k, R] of this rank -> [k, num_tokens] of all ranks of `group`, float32; every token is held
    by one of them.

    places int64 [R]: which tokens are held here. All ranks compute the same loss of the whole, and
    a rank's gradient is that of its own tokens: the sum over ranks, which data parallelism makes,
    is the gradient of one loss.
    """

    @staticmethod
    def forward(
        ctx: Any,
        held: torch.Tensor,
        places: torch.Tensor,
        num_tokens: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        whole = held.new_zeros(held.shape[0], num_tokens)
        whole[:, places] = held
        dist.all_reduce(whole, group=group)  # exact: zeros are added
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (places,) = ctx.saved_tensors
        return gradient[:, places], None, None, None
