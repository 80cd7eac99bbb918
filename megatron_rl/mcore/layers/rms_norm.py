"""RMSNorm of the local layer spec."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig


class RmsNorm(torch.nn.Module):
    """RMSNorm (arXiv 1910.07467): x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    Input and output: [..., hidden_size] of any dtype. The weight has the model's dtype. It is
    marked for sequence parallelism, as Megatron's reduction of gradients requires.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)
