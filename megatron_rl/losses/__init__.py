"""Policy-gradient objectives as pure functions of log-probabilities, chosen by `algo=`."""

from megatron_rl.losses.interface import LossResult, PolicyLoss, ResponseTokens
from megatron_rl.losses.mismatch import rollout_mismatch
from megatron_rl.losses.registry import NAMES, build_policy_loss

__all__ = ["NAMES", "LossResult", "PolicyLoss", "ResponseTokens", "build_policy_loss", "rollout_mismatch"]
