"""The model being trained with what every pass over it shares.

Invariant: the old-policy pass and the update run the same chunks, the same log-probability computation and the same
route replay; only the loss tells them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.losses import PolicyLoss
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.response_logprobs import ResponseLogprobs


@dataclass(frozen=True)
class Policy:
    """models: this rank's chunks. replay None: live routing."""

    models: Sequence[torch.nn.Module]
    logprobs: ResponseLogprobs
    loss: PolicyLoss
    replay: RouteReplay | None
