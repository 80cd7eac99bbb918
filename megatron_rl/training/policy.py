"""The model that is trained, with everything that its passes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_rl.config.algorithms import AlgoSettings, CorrectionSettings
from megatron_rl.losses import Correction, PolicyLoss, Regularization
from megatron_rl.mcore.replay import RouteReplay
from megatron_rl.mcore.weights.reference import ReferenceWeights
from megatron_rl.training.logprobs import ResponseLogprobs


@dataclass(frozen=True)
class Policy:
    """The model that is trained.

    models: this rank's chunks.
    replay: None if the routers choose experts themselves in every pass.
    reference: the weights of the KL penalty's reference, None without a penalty.
    """

    models: Sequence[torch.nn.Module]
    logprobs: ResponseLogprobs
    loss: PolicyLoss
    replay: RouteReplay | None
    correction: Correction = field(default_factory=lambda: Correction(CorrectionSettings()))
    regularization: Regularization = field(
        default_factory=lambda: Regularization(AlgoSettings(name=""))
    )
    reference: ReferenceWeights | None = None
