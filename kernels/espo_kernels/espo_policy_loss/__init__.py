"""The ESPO objective: one ratio per entropy group, clipped by the group's own width."""

from espo_kernels.espo_policy_loss.loss import EspoResult, espo_policy_loss
from espo_kernels.espo_policy_loss.metrics import EspoMetrics

__all__ = ["EspoMetrics", "EspoResult", "espo_policy_loss"]
