"""A user-defined loss: CISPO, which clips a token's weight but keeps its gradient.

With this folder on PYTHONPATH: algo.name=my_loss:Cispo algo.options='{clip_high: 2.0}'
"""

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, Objective, ResponseTokens, mean_of


class Cispo:
    """L = -1/N Σ_t sg[min(r_t, 1 + clip_high)] A_t log π_θ(y_t),  r_t = π_θ(y_t) / π_old(y_t)

    arXiv 2506.13585. N is the number of all trained tokens of the optimizer step, each counted with
    the weight of its group.
    """

    def __init__(self, clip_high: float = 4.0) -> None:
        if not clip_high > 0:
            raise ValueError("clip_high must be above 0")
        self.limit = 1 + clip_high

    def prepare(self, response: ResponseTokens) -> Objective:
        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            ratio = (logprobs.detach() - response.old_logprobs).exp()
            weight = ratio.clamp(max=self.limit)
            count = denominators.tokens or 1.0
            loss = -(weight * response.advantages * logprobs).sum() / count
            return LossResult(loss, sums={"policy/clip_fraction_high": mean_of(ratio > self.limit)})

        return objective
