"""Supervised fine-tuning: the negative log-likelihood of demonstrations."""

from __future__ import annotations

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.interface import (
    LossResult,
    Objective,
    ResponseTokens,
    mean_of,
    require_denominator,
    require_packed,
)


class Sft:
    """L = -1/N Σ_t log π_θ(y_t);  N = denominators.tokens.

    Advantages and the old policy have no effect.
    """

    def prepare(self, response: ResponseTokens) -> Objective:
        """See `PolicyLoss`. The metric policy/nll is in nats per trained token."""

        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            require_packed(logprobs, response)
            count = require_denominator("tokens", denominators.tokens, logprobs.numel())
            return LossResult(-logprobs.sum() / count, {"policy/nll": mean_of(-logprobs)})

        return objective
