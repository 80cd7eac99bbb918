"""Makes Megatron-Core run without CUDA, Transformer Engine or Apex.

Call `install` before anything of Megatron is imported.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megatron_rl.contracts.launch_facts import has_transformer_engine
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
    # Megatron reads checkpoints through torch's earlier interface.
    "`load_state_dict` is deprecated.*",
    "Please use DTensor instead and we are deprecating ShardedTensor.*",
    # Megatron reads gradients of the distributed optimizer's shards.
    "The .grad attribute of a Tensor that is not a leaf.*",
)
# The top-level modules of both libraries that Megatron imports
_TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine_torch")
_APEX = ("apex", "amp_C", "fused_weight_gradient_mlp_cuda")


def install() -> bool:
    """Prepare torch and Megatron-Core for this machine, and silence warnings without action.

    Without CUDA it replaces parts of `torch.cuda`, and hides Transformer Engine and Apex, whose
    functions take CUDA tensors only. It also hides a Transformer Engine that does not run on this
    GPU. Where both libraries are missing or hidden, it replaces what Megatron takes from them. On
    GPUs it makes the additions of the MoE permutation deterministic. A second call only silences
    the warnings again.

    Returns True if `torch` itself was changed, which is only the case without CUDA.
    """
    _ignore_expected_warnings()
    if is_patched():
        return False
    if torch.cuda.is_available():
        if transformer_engine_fault():
            hide_modules(_TRANSFORMER_ENGINE)
        _replace_missing_libraries()
        _make_permute_deterministic()
        return False
    hide_modules(_TRANSFORMER_ENGINE + _APEX)
    patch_torch_cuda()
    patch_torch_factories()
    with _without_compilation():
        # Both import Megatron, which must happen after torch is patched.
        from megatron_rl.mcore.cpu.megatron_patches import patch_megatron

        _replace_missing_libraries()
        patch_megatron()
    return True


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
    # A CUDA build of torch warns here on a machine without a GPU, when Megatron imports the module
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _replace_missing_libraries() -> None:
    """Replace what Megatron requires from Transformer Engine or Apex, if it found neither."""
    import megatron.core.optimizer as optimizer
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention
    import megatron.core.utils as utils

    from megatron_rl.mcore.adam import FusedLayoutAdam

    # Megatron-Core 0.16.1 defines this name only where Transformer Engine can be imported, and
    # reads it everywhere.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not has_transformer_engine():
        # Megatron-Core 0.16.1 takes None, its own substitute for Transformer Engine's layers, for
        # the real layers.
        multi_latent_attention.HAVE_TE = False
    if clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = norm_of_all
        clip_grads.multi_tensor_scale_impl = scale_all
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    # Megatron falls back to torch's Adam, whose state it cannot checkpoint.
    optimizer.Adam = distrib_optimizer.Adam = FusedLayoutAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True


def norm_of_all(
    chunk_size: int, skip: Any, lists: Sequence[Sequence[torch.Tensor]], per_tensor: bool, *_: Any
) -> tuple[torch.Tensor, None]:
    """Return the norm over all tensors of all lists, float32 [1], on their device.

    It replaces Megatron-Core 0.16.1's `local_multi_tensor_l2_norm`, which reads the norm of each
    tensor on the host. On CPUs both return the same bits, on GPUs they agree within rounding
    (tests/mcore/test_gradient_norm.py). The other arguments are as in Apex's function.
    """
    tensors = [tensor for tensors in lists for tensor in tensors]
    norms = torch.stack(torch._foreach_norm(tensors))
    return torch.norm(norms[None]).float()[None], None


def scale_all(
    chunk_size: int, skip: Any, lists: Sequence[Sequence[torch.Tensor]], factor: float
) -> None:
    """Multiply float32 tensors by a factor in place. `lists` holds the same tensors twice.

    It replaces Megatron-Core 0.16.1's `local_multi_tensor_scale`, which copies each product. Both
    give the same bits. The other arguments are as in Apex's function.
    """
    tensors, _ = lists
    torch._foreach_mul_(list(tensors), factor)


def _make_permute_deterministic() -> None:
    """Fix the order of additions on GPUs, once. On CPUs additions already have an order."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    from megatron_rl.mcore.layers.deterministic_permute import (
        deterministic_permute,
        deterministic_unpermute,
    )

    if token_dispatcher.permute is not moe_utils.permute:
        return
    token_dispatcher.permute = deterministic_permute(token_dispatcher.permute)
    token_dispatcher.unpermute = deterministic_unpermute(token_dispatcher.unpermute)
