"""Names of dtypes in the configuration to torch's."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """float32 or bfloat16. Raises KeyError for any other name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
