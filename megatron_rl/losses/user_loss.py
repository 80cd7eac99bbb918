"""A user-defined loss, with checks of its results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megatron_rl.contracts.plugins import PluginError, user_code
from megatron_rl.contracts.step_plan import Denominators
from megatron_rl.losses.interface import LossResult, Objective, PolicyLoss, ResponseTokens


class UserLoss:
    """A user-defined loss that `algo.name` selects.

    Its exceptions and invalid results become a `PluginError` that names it.

    options: the loss was constructed with these.
    """

    def __init__(self, name: str, loss: PolicyLoss, options: Mapping[str, Any]) -> None:
        self._key = f"algo.name={name}"
        self._options = options
        self.loss = loss

    def prepare(self, response: ResponseTokens) -> Objective:
        """See `PolicyLoss`."""
        with user_code(f"{self._key}: prepare", options=self._options):
            user_objective = self.loss.prepare(response)
        if not callable(user_objective):
            raise PluginError(
                f"{self._key}: prepare returns {type(user_objective).__name__}. "
                "Return a function, the objective"
            )

        def objective(logprobs: torch.Tensor, denominators: Denominators) -> LossResult:
            call = f"{self._key}: the objective that prepare returned"
            with user_code(call, options=self._options):
                result = user_objective(logprobs, denominators)
            if problem := _problem(result, logprobs):
                raise PluginError(f"{call} {problem}")
            return result

        return objective


def _problem(result: object, logprobs: torch.Tensor) -> str | None:
    """Return why a result is no valid `LossResult`, or None. Checks types and shapes only."""
    if not isinstance(result, LossResult):
        return f"gives {type(result).__name__}. Return a LossResult"
    loss = result.loss
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        kind = f"{list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        return f"gives a LossResult whose loss is {kind}. Give a scalar tensor"
    if logprobs.requires_grad and not loss.requires_grad:
        return "gives a loss without a gradient. Compute it from logprobs, and do not detach them"
    for name, pair in result.sums.items():
        if not isinstance(pair, torch.Tensor) or pair.shape != (2,):
            return (
                f"gives sums[{name!r}] that is not a tensor of a sum and a weight. "
                "Use mean_of(values)"
            )
    return None
