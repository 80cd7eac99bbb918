"""A user-defined loss with numbers that go wrong."""

import gc
from typing import Any

import torch

from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses import LossResult, Objective, ResponseTokens

# A batch with this log-probability of a sampled token goes wrong
MARKER = -7.25


class PlantedNumbers:
    """The policy-gradient loss of tokens.

    action: what becomes of a loss at fault. spike: it is multiplied by 1000. not_finite: it is NaN.
    poison: an embedding that no token uses becomes NaN, and the loss stays. nothing: the loss
    stays. calls: the calls of the
    loss at fault, counted from 1 with the warm-up's call. Empty: calls with the marker.
    """

    def __init__(self, action: str, calls: tuple[int, ...] = ()) -> None:
        self._action = action
        self._calls = set(calls)
        self._count = 0

    def prepare(self, response: ResponseTokens) -> Objective:
        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            self._count += 1
            loss = -(response.advantages * logprobs).sum() / (denominators.tokens or 1.0)
            if self._is_at_fault(response):
                loss = self._spoil(loss)
            return LossResult(loss, sums={})

        return objective

    def _is_at_fault(self, response: ResponseTokens) -> bool:
        if self._calls:
            return self._count in self._calls
        return bool((response.rollout_logprobs == MARKER).any())

    def _spoil(self, loss: torch.Tensor) -> torch.Tensor:
        if self._action == "poison":
            gc.unfreeze()  # the run hides its objects from the collector
            embedding = next(m for m in gc.get_objects() if _is_embedding(m))
            embedding.weight.data[0] = float("nan")
            return loss
        factors = {"spike": 1000.0, "not_finite": float("nan"), "nothing": 1.0}
        return loss * factors[self._action]


def _is_embedding(value: Any) -> bool:
    return type(value).__name__ == "VocabParallelEmbedding"
