"""Selects the implementation that serves a call."""

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
    if backend == "auto":
        return _fastest_backend(tensor, cpu_needs_numba)
    if tensor.dtype == torch.float64 and backend != "reference":
        raise ValueError(
            f"backend={backend!r} computes in float32: pass float32 tensors, or backend='reference'"
        )
    if backend == "cpu":
        _require_cpu_backend(tensor, cpu_needs_numba)
    if backend == "triton":
        _require_triton_backend(tensor)
    return backend


def _fastest_backend(tensor: torch.Tensor, cpu_needs_numba: bool) -> Backend:
    if tensor.dtype == torch.float64:
        return "reference"
    if tensor.device.type == "cuda":
        return "triton" if _is_installed("triton") else "reference"
    return "reference" if cpu_needs_numba and not _is_installed("numba") else "cpu"


def _require_cpu_backend(tensor: torch.Tensor, cpu_needs_numba: bool) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(
            f"backend='cpu' got tensors on {tensor.device}: move them, or use backend='auto'"
        )
    if cpu_needs_numba and not _is_installed("numba"):
        raise ValueError("backend='cpu' needs numba: install it, or use backend='reference'")


def _require_triton_backend(tensor: torch.Tensor) -> None:
    if not _is_installed("triton"):
        raise ValueError("backend='triton' needs triton: install it, or use backend='auto'")
    if tensor.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"backend='triton' got tensors on {tensor.device}: move them to CUDA, or set "
            "TRITON_INTERPRET=1 before triton is imported (slow, for tests)"
        )


def checks_values(tensor: torch.Tensor, backend: Backend, override: bool | None = None) -> bool:
    """True if a call served by `backend` reads values, which synchronises with a GPU.

    override: the answer, if it is not None. Without it, values are read on CPU and in the
    reference, which synchronises anyway, and elsewhere with ESPO_KERNELS_DEBUG=1.
    """
    if override is not None:
        return override
    return (
        tensor.device.type == "cpu"
        or backend == "reference"
        or os.environ.get("ESPO_KERNELS_DEBUG") == "1"
    )


def _is_installed(module: str) -> bool:
    return find_spec(module) is not None
