"""Interface of losses: their inputs and results."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from megatron_rl.contracts.step_plan import Denominators


@dataclass(frozen=True)
class ResponseTokens:
    """Trained tokens of one micro-batch: T packed tokens of B sequences.

    old_logprobs, old_entropies: float32 [T], nats, of the trainer's policy at step start.
    rollout_logprobs: float32 [T], nats, of the policy that sampled the tokens. NaN for tokens that
    were not sampled.
    advantages: float32 [T].
    cu_seqlens: int32 [B + 1]. Sequence i consists of tokens cu_seqlens[i] to cu_seqlens[i + 1] and
    may be empty. The zero-loss filler has T = 0 and B = 0.
    """

    old_logprobs: torch.Tensor
    old_entropies: torch.Tensor
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    cu_seqlens: torch.Tensor


class TokenRatios(NamedTuple):
    """Importance ratios of T tokens, for records. No gradient flows through them.

    ratios: float32 [T], the ratio that the loss gives each token.
    clips: int8 [T], tokens whose ratio a bound limits: -1 for the lower bound, 1 for the upper
    bound, 0 for the others. policy/clip_fraction_low and policy/clip_fraction_high count them. None
    for a loss that does not mark them.
    """

    ratios: torch.Tensor
    clips: torch.Tensor | None


@dataclass(frozen=True)
class LossResult:
    """Loss and metrics of one micro-batch.

    loss: scalar to be minimised, attached to the graph of the log-probabilities. It is the
    micro-batch's sum divided by a global denominator.
    sums: detached float32 [2] tensors (weighted sum, weight). A metric is their quotient after
    summation over micro-batches and ranks.
    maxima: detached scalars. A metric is their maximum.
    token_ratios: computes the ratios for the samples that a run keeps. None: they are
    π_θ(y_t) / π_old(y_t), and clipped tokens are not marked.
    """

    loss: torch.Tensor
    sums: dict[str, torch.Tensor]
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    token_ratios: Callable[[], TokenRatios] | None = None


Objective = Callable[[torch.Tensor, Denominators], LossResult]
"""Function from the current policy's log-probabilities, float32 [T] in nats, to the loss.

NaN inputs give a NaN loss.
"""


class PolicyLoss(Protocol):
    """A loss of packed response tokens. A user-defined loss needs the method `prepare`."""

    @abstractmethod
    def prepare(self, response: ResponseTokens) -> Objective:
        """Return the objective of one micro-batch. Called once, before its first update."""
        ...


def mean_of(values: torch.Tensor) -> torch.Tensor:
    """Return the sum and number of values, float32 [2], for `LossResult.sums`."""
    total = values.detach().float().sum()
    return torch.stack([total, torch.full_like(total, values.numel())])


def require_packed(logprobs: torch.Tensor, response: ResponseTokens) -> None:
    """Raise ValueError unless all tensors are [T] and cu_seqlens is [B + 1].

    Checks shapes only, because reading values would wait for the device.
    """
    if logprobs.ndim != 1:
        raise ValueError(
            f"logprobs have shape {tuple(logprobs.shape)}; packed tokens [T] are needed"
        )
    for name in ("old_logprobs", "old_entropies", "rollout_logprobs", "advantages"):
        shape = getattr(response, name).shape
        if shape != logprobs.shape:
            raise ValueError(
                f"{name} has shape {tuple(shape)}, logprobs {tuple(logprobs.shape)}; "
                "they must be equal"
            )
    if response.cu_seqlens.ndim != 1 or response.cu_seqlens.numel() < 1:
        raise ValueError(
            f"cu_seqlens has shape {tuple(response.cu_seqlens.shape)}; [B + 1] is needed"
        )


def require_denominator(name: str, value: float, num_tokens: int) -> float:
    """Return a plan's denominator, or 1 for 0. Raises ValueError for 0 with tokens to train."""
    if value <= 0 and num_tokens > 0:
        raise ValueError(
            f"denominators.{name}={value:g} with {num_tokens} tokens to train: "
            "the plan must count at least one"
        )
    return value if value > 0 else 1.0
