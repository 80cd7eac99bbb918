"""Triton's interpreter must be switched on before Triton is imported, so `triton/` is collected
only where Triton can run: on CUDA, or in the process that `test_triton_interpreted.py` starts.
"""

import os

import pytest
import torch

collect_ignore = (
    [] if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" else ["triton"]
)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)
