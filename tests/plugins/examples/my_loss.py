"""A loss of your own: CISPO, which clips the weight of a token instead of leaving the token out.

With this folder on PYTHONPATH: algo.name=own_loss:Cispo algo.options='{clip_high: 2.0}'
"""

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, Objective, ResponseTokens, mean_of


class Cispo:
    """L = -1/N Σ_t sg[min(r_t, 1 + clip_high)] A_t log π_θ(y_t),  r_t = π_θ(y_t) / π_old(y_t)
    (arXiv 2506.13585)

    N: all tokens of the step, as the plan counts them.
    """

    def __init__(self, clip_high: float = 4.0) -> None:
        if not clip_high > 0:
            raise ValueError("clip_high must be above 0")
        self.most = 1 + clip_high

    def prepare(self, response: ResponseTokens) -> Objective:
        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            ratio = (logprobs.detach() - response.old_logprobs).exp()
            loss = -(ratio.clamp(max=self.most) * response.advantages * logprobs).sum() / max(
                denominators.tokens, 1
            )
            return LossResult(loss, sums={"policy/clip_fraction_high": mean_of(ratio > self.most)})

        return objective
