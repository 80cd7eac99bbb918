"""Transformer Engine and other libraries for GPUs where they are installed and do not run.

Megatron takes a library that it can import for one that runs. A library that it cannot import
must raise ImportError, or Megatron itself cannot be imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

import torch

from megatron_rl.config.schema import ModelSettings
from megatron_rl.contracts.launch_facts import transformer_engine_error
from megatron_rl.contracts.refusal import ConfigurationRefused, Refusal


def require_transformer_engine(model: ModelSettings) -> None:
    """Refuse settings that choose an installed Transformer Engine which does not run here.

    Null chooses it too, except in float32. Raises `ConfigurationRefused`.
    """
    is_chosen = model.spec == "te" or (model.spec is None and model.dtype != "float32")
    if not (is_chosen and torch.cuda.is_available()):
        return
    if fault := transformer_engine_fault():
        rule = f"Transformer Engine is installed here, and {fault}"
        remedy = "Install one that is built for this GPU and this torch, or use model.spec=local"
        raise ConfigurationRefused([Refusal("model.spec", model.spec, rule, remedy)])


@functools.cache
def transformer_engine_fault() -> str:
    """Return why an installed Transformer Engine does not run on this process's GPU, else "".

    It cannot be imported, or it was built for other GPUs. The driver refuses its kernels only when
    they are launched. Launches one. Needs CUDA.
    """
    if find_spec("transformer_engine") is None:
        return ""
    if error := transformer_engine_error():
        return f"it cannot be imported: {error}"
    if error := kernel_error():
        return f"its kernels do not run on {torch.cuda.get_device_name()}: {error}"
    return ""


def kernel_error() -> str:
    """Compute the norm of four numbers with Transformer Engine. Returns the error, else ""."""
    from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm

    try:
        numbers = torch.full((4,), 2.0, device="cuda")
        is_infinite = torch.zeros(1, dtype=torch.int, device="cuda")
        norm, _ = multi_tensor_applier(multi_tensor_l2norm, is_infinite, [[numbers]], False)
        value = float(norm)
    except Exception as error:  # a broken binary may raise anything
        return f"{type(error).__name__}: {error}"
    return "" if value == 4.0 else f"the norm of (2, 2, 2, 2) is {value}"


def hide_modules(packages: Collection[str]) -> None:
    """Let every import of these top-level modules fail as if they were not installed.

    `find_spec` does not find them either.
    """
    modules: dict[str, Any] = sys.modules
    for name in (*modules, *packages):
        if name.partition(".")[0] in packages:
            modules[name] = None  # Python's import system reads this as "not installed"
