"""Losses: pure functions of log-probabilities, selected by `algo=`. They run on every rank."""

from megatron_rl.losses.corrections import Correction
from megatron_rl.losses.interface import (
    LossResult,
    Objective,
    PolicyLoss,
    ResponseTokens,
    TokenRatios,
    mean_of,
)
from megatron_rl.losses.mismatch import mismatch_by_age, rollout_mismatch
from megatron_rl.losses.registry import open_loss
from megatron_rl.losses.regularization import Regularization

__all__ = [
    "Correction",
    "LossResult",
    "Objective",
    "PolicyLoss",
    "Regularization",
    "ResponseTokens",
    "TokenRatios",
    "mean_of",
    "mismatch_by_age",
    "open_loss",
    "rollout_mismatch",
]
