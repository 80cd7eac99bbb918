"""Maps dtype names of the configuration to torch dtypes."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype for "float32" or "bfloat16". Raises KeyError for any other name."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
