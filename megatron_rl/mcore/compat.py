"""Makes Megatron-Core run without CUDA, Transformer Engine or Apex.

Call `install` before anything of Megatron is imported.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from megatron_rl.mcore.cpu.torch_cuda import is_patched, patch_torch_cuda, patch_torch_factories
from megatron_rl.mcore.gpu_libraries import hide_modules, transformer_engine_fault

_EXPECTED_WARNINGS = (
    # This module exists because these libraries may be missing.
    ".*(Apex|Transformer Engine).*",
    # Whether attention is recomputed is a setting of the run.
    "If you are using transformer_engine as the transformer implementation.*",
    # Megatron calls torch's collectives by their old names.
    ".*reduce_scatter_tensor.*is deprecated.*",
    ".*all_gather_into_tensor.*is deprecated.*",
    # Megatron reads checkpoints through torch's earlier interface, each rank for itself.
    "The argument order of load has been changed.*",
    "torch.distributed is disabled, unavailable or uninitialized, assuming the intent is to load.*",
    "Please use DTensor instead and we are deprecating ShardedTensor.*",
    # Megatron imports its multimodal models with its optimizer.
    "MimoModelConfig is experimental.*",
    # Megatron reads gradients of the distributed optimizer's shards.
    "The .grad attribute of a Tensor that is not a leaf.*",
)
# Loggers whose warnings need no action. Errors stay.
_QUIET_LOGGERS = (
    # A CUDA build of torch warns here on a machine without a GPU, when Megatron imports the module.
    "torch.utils.cpp_extension",
    # GPTModel, the DDP that lays out its own buffers, and `common.pt` are deprecated, and work.
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.distributed.distributed_data_parallel",
    "megatron.core.dist_checkpointing.strategies.common",
)
# The top-level modules of both libraries that Megatron imports
_TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")
_APEX = ("apex", "amp_C", "fused_weight_gradient_mlp_cuda")


def install() -> bool:
    """Prepare torch and Megatron-Core for this machine, and silence warnings without action.

    Without CUDA it replaces parts of `torch.cuda`, and hides Transformer Engine and Apex, whose
    functions take CUDA tensors only. It also hides a Transformer Engine that does not run on this
    GPU. Where both libraries are missing or hidden, it replaces what Megatron takes from them.
    Routers sort the experts of a row, and on GPUs the additions of the MoE permutation have a fixed
    order. A second call only silences the warnings again.

    Returns True if `torch` itself was changed, which is only the case without CUDA.
    """
    _ignore_expected_warnings()
    if is_patched():
        return False
    if torch.cuda.is_available():
        if transformer_engine_fault():
            hide_modules(_TRANSFORMER_ENGINE)
        _patch_megatron(on_gpu=True)
        return False
    hide_modules(_TRANSFORMER_ENGINE + _APEX)
    patch_torch_cuda()
    patch_torch_factories()
    with _without_compilation():
        _patch_megatron(on_gpu=False)
    return True


def _patch_megatron(*, on_gpu: bool) -> None:
    # It imports Megatron, which must happen after torch is patched.
    from megatron_rl.mcore import seams

    seams.replace_missing_libraries()
    seams.sort_chosen_experts()
    if on_gpu:
        seams.make_permute_deterministic()
    else:
        seams.replace_cuda_functions()


@contextlib.contextmanager
def _without_compilation() -> Iterator[None]:
    """Make `torch.compile` return functions unchanged while Megatron is imported.

    Megatron marks small functions for torch.compile when it is imported. The mark alone imports
    torch's compiler, which takes two seconds in every rank, and calling such a function needs a
    C++ compiler.
    """

    def keep_function(function: Any = None, **_: Any) -> Any:
        return function if function is not None else keep_function

    library: Any = torch
    original_compile = library.compile
    library.compile = keep_function
    try:
        yield
    finally:
        library.compile = original_compile


def _ignore_expected_warnings() -> None:
    """Silence warnings that hold on every rank of every such run and that need no action."""
    for message in _EXPECTED_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
