"""Private names of Megatron-Core, and names that this trainer replaces.

Megatron does not promise to keep them. No other module touches one, and a test fails by its name
when it disappears (tests/mcore/test_seams.py). docs/support.md says what each is for.

Import it after torch is prepared for this machine (`compat.install`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import megatron.core.dist_checkpointing.state_dict_utils as state_dict_utils
import megatron.core.optimizer as optimizer
import megatron.core.optimizer.clip_grads as clip_grads
import megatron.core.optimizer.distrib_optimizer as distrib_optimizer
import megatron.core.tensor_parallel.mappings as mappings
import megatron.core.tensor_parallel.random as random
import megatron.core.transformer.moe.moe_utils as moe_utils
import megatron.core.transformer.moe.router as router
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
import megatron.core.utils as utils
import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    _replace_state_dict_keys_with_sharded_keys,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron_rl.mcore.adam import FusedLayoutAdam
from megatron_rl.mcore.cpu.padded_collectives import padded_gather, padded_reduce_scatter
from megatron_rl.mcore.layers.deterministic_permute import (
    deterministic_permute,
    deterministic_unpermute,
)

_SINCE_0_16 = ("0.16.1", "0.19.2")
_SINCE_0_19 = ("0.19.2", "0.19.2")
# By module, each name with the versions of Megatron-Core between which it was read. A dot leads to
# an attribute of a class.
SEAMS = {
    "megatron.core.dist_checkpointing.state_dict_utils": {
        "validate_sharding_integrity": _SINCE_0_16,
    },
    "megatron.core.dist_checkpointing.strategies.torch": {
        "_replace_state_dict_keys_with_sharded_keys": _SINCE_0_16,
    },
    "megatron.core.optimizer": {
        "Adam": _SINCE_0_16,
        "USING_PYTORCH_OPTIMIZER": _SINCE_0_16,
    },
    "megatron.core.optimizer.clip_grads": {
        "l2_norm_impl": _SINCE_0_16,
        "multi_tensor_scale_impl": _SINCE_0_16,
    },
    "megatron.core.optimizer.distrib_optimizer": {
        "Adam": _SINCE_0_16,
        "HAVE_APEX_OR_TE": _SINCE_0_16,
        "USING_TE_OPTIMIZER": _SINCE_0_16,
    },
    "megatron.core.tensor_parallel.mappings": {
        "_gather_along_first_dim": _SINCE_0_16,
        "_reduce_scatter_along_first_dim": _SINCE_0_16,
    },
    "megatron.core.tensor_parallel.random": {
        "_get_cuda_rng_state": _SINCE_0_16,
        "_set_cuda_rng_state": _SINCE_0_16,
    },
    "megatron.core.transformer.moe.router": {
        "TopKRouter._maintain_float32_expert_bias": _SINCE_0_16,
        "topk_routing_with_score_function": _SINCE_0_16,
    },
    "megatron.core.transformer.moe.token_dispatcher": {
        "maybe_move_tensor_to_cpu": _SINCE_0_16,
        "permute": _SINCE_0_16,
        "unpermute": _SINCE_0_16,
    },
    "megatron.core.transformer.multi_latent_attention": {
        "MLASelfAttention._resolve_qk_norm_config": _SINCE_0_19,
    },
}


class WholeQueryAttention(MLASelfAttention):
    """Latent attention that does not compress queries, and so has no norm for them.

    Megatron takes `qk_layernorm`, which keys and values need, for a norm of the queries too.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {
            "linear_q_proj": submodules.linear_q_proj,
            "linear_q_up_proj": IdentityOp,
            "linear_kv_up_proj": submodules.linear_kv_up_proj,
            "q_layernorm": IdentityOp,
            "kv_layernorm": submodules.kv_layernorm,
        }


def keep_expert_bias(layer: TopKRouter) -> None:
    """Convert the expert bias of a router back to float32. A rounded one chooses other experts."""
    layer._maintain_float32_expert_bias()


def count_padding(model: DistributedDataParallel) -> None:
    """Let checkpoints hold the right part of the optimizer's state for every parameter.

    Megatron joins the state of all buckets without the padding at their ends, but looks up
    parameters at their places with the padding. With several buckets, most parameters would get
    the moments and float32 weights of others.
    """
    for buffer in (*model.buffers, *model.expert_parallel_buffers):
        if len(buffer.buckets) > 1:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()


def by_whole_names(state: ShardedStateDict) -> ShardedStateDict:
    """Return this rank's share of a state by the names of its tensors in the whole model."""
    tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(state, True)
    return tensors


def skip_check_of_places() -> None:
    """Let a saving rank not compare its places with those of ranks that do not exist."""
    state_dict_utils.validate_sharding_integrity = lambda *_, **__: None


def replace_random_states(read: Callable[..., torch.Tensor], write: Callable[..., None]) -> None:
    """Read and write the state of the GPU's random generator with these functions."""
    random._get_cuda_rng_state = read
    random._set_cuda_rng_state = write


def replace_cuda_functions() -> None:
    """Replace random states, host copies and collectives that need CUDA tensors or NCCL."""
    replace_random_states(_read_random_state, _write_random_state)
    token_dispatcher.maybe_move_tensor_to_cpu = _move_to_cpu
    # The token dispatcher calls these over the ranks that share an expert.
    mappings._gather_along_first_dim = padded_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = padded_reduce_scatter(
        mappings._reduce_scatter_along_first_dim
    )


def _read_random_state(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    """Megatron's tracker drives a CUDA generator, which does not exist here."""
    return torch.get_rng_state()


def _write_random_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert split sizes to numpy, which the all-to-all requires.

    Megatron's function converts CUDA tensors only.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def replace_missing_libraries() -> None:
    """Replace what Megatron requires from Transformer Engine or Apex, if it found neither."""
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

    It replaces Megatron's `local_multi_tensor_l2_norm`, which reads the norm of each tensor on the
    host. On CPUs both return the same bits, on GPUs they agree within rounding
    (tests/mcore/test_gradient_norm.py). The other arguments are as in Apex's function.
    """
    tensors = [tensor for tensors in lists for tensor in tensors]
    norms = torch.stack(torch._foreach_norm(tensors))
    return torch.norm(norms[None]).float()[None], None


def scale_all(
    chunk_size: int, skip: Any, lists: Sequence[Sequence[torch.Tensor]], factor: float
) -> None:
    """Multiply float32 tensors by a factor in place. `lists` holds the same tensors twice.

    It replaces Megatron's `local_multi_tensor_scale`, which copies each product. Both give the same
    bits. The other arguments are as in Apex's function.
    """
    tensors, _ = lists
    torch._foreach_mul_(list(tensors), factor)


def make_permute_deterministic() -> None:
    """Fix the order of additions on GPUs, once. On CPUs additions already have an order."""
    if token_dispatcher.permute is not moe_utils.permute:
        return
    token_dispatcher.permute = deterministic_permute(token_dispatcher.permute)
    token_dispatcher.unpermute = deterministic_unpermute(token_dispatcher.unpermute)


def sort_chosen_experts() -> None:
    """Let routers sort the experts of a row by their scores in every pass, once.

    Megatron leaves them in any order in passes without gradients. The weights of more than two
    experts are then added in another order than in passes with gradients, so that the
    log-probabilities of both passes, and a layer and its recomputation, differ in their last bits.
    """
    if router.topk_routing_with_score_function is moe_utils.topk_routing_with_score_function:
        router.topk_routing_with_score_function = _sorted(
            moe_utils.topk_routing_with_score_function
        )


def _sorted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run Megatron's routing in a mode with gradients, in which it sorts.

    Without inputs that need gradients it records none. `RouterTarget` does this itself: it must see
    whether the pass has gradients.
    """

    @wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        if options.get("router_replay") is not None:
            return function(*arguments, **options)
        with torch.enable_grad():
            return function(*arguments, **options)

    return run
