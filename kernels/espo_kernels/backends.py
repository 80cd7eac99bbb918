"""Which implementation serves a call."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Literal

import torch

Backend = Literal["auto", "reference", "cpu", "triton"]


def resolve_backend(
    backend: Backend, tensor: torch.Tensor, *, cpu_needs_numba: bool = False
) -> Backend:
    """The backend that serves `tensor`: never "auto".

    float64 tensors are served by "reference" under "auto": the fast paths compute in float32.
    Raises ValueError for a backend that cannot serve the tensor's device or that is not installed.
    """
    if backend not in ("auto", "reference", "cpu", "triton"):
        raise ValueError(f"backend={backend!r}: must be 'auto', 'reference', 'cpu' or 'triton'")
    on_gpu = tensor.device.type == "cuda"
    if backend == "auto":
        if tensor.dtype == torch.float64:
            return "reference"
        if on_gpu:
            return "triton" if _installed("triton") else "reference"
        return "reference" if cpu_needs_numba and not _installed("numba") else "cpu"
    if tensor.dtype == torch.float64 and backend != "reference":
        raise ValueError(
            f"backend={backend!r} computes in float32: pass float32 tensors, or backend='reference'"
        )
    if backend == "cpu":
        if tensor.device.type != "cpu":
            raise ValueError(
                f"backend='cpu' got tensors on {tensor.device}: move them, or use backend='auto'"
            )
        if cpu_needs_numba and not _installed("numba"):
            raise ValueError("backend='cpu' needs numba: install it, or use backend='reference'")
    if backend == "triton":
        if not _installed("triton"):
            raise ValueError("backend='triton' needs triton: install it, or use backend='auto'")
        if not on_gpu and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(
                f"backend='triton' got tensors on {tensor.device}: move them to CUDA, or set TRITON_INTERPRET=1 "
                "before triton is imported (slow, for tests)"
            )
    return backend


def checks_values(tensor: torch.Tensor, backend: Backend, wanted: bool | None = None) -> bool:
    """Whether a call served by `backend` looks at values, which synchronises with a GPU.

    As `wanted`; without a wish always on CPU and in the reference, which synchronises anyway, and
    elsewhere when ESPO_KERNELS_DEBUG=1.
    """
    if wanted is not None:
        return wanted
    return (
        tensor.device.type == "cpu"
        or backend == "reference"
        or os.environ.get("ESPO_KERNELS_DEBUG") == "1"
    )


def _installed(module: str) -> bool:
    return find_spec(module) is not None
