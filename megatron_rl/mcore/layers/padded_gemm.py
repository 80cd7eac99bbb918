"""Linear layers of experts whose results do not depend on how few tokens an expert gets.

MKL sums a product of one to three rows in a different order from a product of four and more. A
token's result would depend on how many other tokens its expert gets, and would differ from the
engine's (`tests/mcore/test_same_sums.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

_MIN_ROWS = 4


class ExpertColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel layer, with one to three input rows [rows, in] padded to four."""

    def forward(self, input_: torch.Tensor, *rest: Any, **options: Any) -> Any:
        output, bias = super().forward(_pad_rows(input_), *rest, **options)
        return output[: len(input_)], bias


class ExpertRowLinear(RowParallelLinear):
    """Megatron's row-parallel layer, with one to three input rows [rows, in] padded to four."""

    def forward(self, input_: torch.Tensor) -> Any:
        output, bias = super().forward(_pad_rows(input_))
        return output[: len(input_)], bias


def _pad_rows(rows: torch.Tensor) -> torch.Tensor:
    if 0 < len(rows) < _MIN_ROWS:
        return F.pad(rows, (0, 0, 0, _MIN_ROWS - len(rows)))
    return rows
