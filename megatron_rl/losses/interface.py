"""What every loss takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron_rl.contracts.step_plan import Denominators


@dataclass(frozen=True)
class ResponseTokens:
    """The trained tokens of one micro-batch, packed: T tokens of B sequences.

    old_logprobs, old_entropies: float32 [T], nats, of the trainer's policy at step start.
    rollout_logprobs: float32 [T], nats, of the policy that sampled the tokens, NaN where nobody
    did. advantages: float32 [T]. cu_seqlens: int32 [B + 1], sequence i holds tokens cu_seqlens[i]
    to cu_seqlens[i + 1]; it may be empty. The zero-loss filler has T = 0 and B = 0.
    """

    old_logprobs: torch.Tensor
    old_entropies: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclass(frozen=True)
class LossResult:
    """loss: scalar to be minimised, local numerator / global denominator, attached to the
    log-probabilities' graph.

    sums: float32 [2] tensors (weighted sum, weight); their quotient after summation is the metric.
    maxima: scalars. Both are detached.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)


Objective = Callable[[torch.Tensor, Denominators], LossResult]
"""The loss of the current policy's log-probabilities, float32 [T], nats. NaN in, NaN out."""


class PolicyLoss(Protocol):
    """An objective over packed response tokens."""

    def prepare(self, response: ResponseTokens) -> Objective:
        """What the updates of one micro-batch call; called once, before the first of them."""
        ...


def mean_of(values: torch.Tensor) -> torch.Tensor:
    """float32 [2]: the values' sum and their number, as `LossResult.sums` takes them."""
    total = values.detach().float().sum()
    return torch.stack([total, torch.full_like(total, values.numel())])


def require_packed(logprobs: torch.Tensor, response: ResponseTokens) -> None:
    """Raise ValueError unless all tensors are [T] and cu_seqlens is [B + 1].

    Looks at shapes only.
    """
    if logprobs.ndim != 1:
        raise ValueError(
            f"logprobs have shape {tuple(logprobs.shape)}; packed tokens [T] are needed"
        )
    for name in ("old_logprobs", "old_entropies", "rollout_logprobs", "advantages"):
        shape = getattr(response, name).shape
        if shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, logprobs {tuple(logprobs.shape)}; they must agree"
            )
    if response.cu_seqlens.ndim != 1 or response.cu_seqlens.numel() < 1:
        raise ValueError(
            f"cu_seqlens has shape {tuple(response.cu_seqlens.shape)}; [B + 1] is needed"
        )


def require_denominator(name: str, value: int, num_tokens: int) -> int:
    """A plan's denominator. Raises ValueError when tokens are to be trained and it is zero."""
    if value < 1 and num_tokens > 0:
        raise ValueError(
            f"denominators.{name}={value} with {num_tokens} tokens to train: the plan counts at least one"
        )
    return max(value, 1)
