"""Products of an expert's weights with the few tokens that it may get.

MKL adds up a product of one to three rows differently from those of four and more: a token's result
would depend on how many others its expert got, and differ from the engine's
(`tests/mcore/test_same_sums.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

_FEWEST = 4


class ExpertColumnLinear(ColumnParallelLinear):
    """Pads rows [rows, in] up to four, and cuts the result."""

    def forward(self, input_: torch.Tensor, *rest: Any, **options: Any) -> Any:
        output, bias = super().forward(_padded(input_), *rest, **options)
        return output[: len(input_)], bias


class ExpertRowLinear(RowParallelLinear):
    """Pads rows [rows, in] up to four, and cuts the result."""

    def forward(self, input_: torch.Tensor) -> Any:
        output, bias = super().forward(_padded(input_))
        return output[: len(input_)], bias


def _padded(rows: torch.Tensor) -> torch.Tensor:
    return F.pad(rows, (0, 0, 0, _FEWEST - len(rows))) if 0 < len(rows) < _FEWEST else rows
