"""Linear layers of experts whose results do not depend on how few tokens an expert gets.

MKL sums a product of few rows in a different order from a product of more. A token's result would
depend on how many other tokens its expert gets, and would differ from the engine's
(`tests/mcore/test_same_sums.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from sglang_bridge.cpu_shim.small_products import pad_rows


class ExpertColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel layer, with few input rows [rows, in] padded."""

    def forward(self, input_: torch.Tensor, *rest: Any, **options: Any) -> Any:
        output, bias = super().forward(pad_rows(input_), *rest, **options)
        return output[: len(input_)], bias


class ExpertRowLinear(RowParallelLinear):
    """Megatron's row-parallel layer, with few input rows [rows, in] padded."""

    def forward(self, input_: torch.Tensor) -> Any:
        output, bias = super().forward(pad_rows(input_))
        return output[: len(input_)], bias
