"""Which backends a test can run here.

Invariant: Triton is tested wherever it can run: compiled on CUDA, interpreted when TRITON_INTERPRET=1 was set before
it was imported.
"""

from __future__ import annotations

import os

import torch

TRITON_RUNS = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
