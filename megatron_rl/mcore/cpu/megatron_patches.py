"""Changes to Megatron-Core functions that assume CUDA tensors, CUDA generators or NCCL."""

from __future__ import annotations

from typing import Any

import torch

from megatron_rl.mcore.cpu.padded_collectives import padded_gather, padded_reduce_scatter


def patch_megatron() -> None:
    """Replace Megatron's random states, host copies and uneven collectives. Imports Megatron."""
    import megatron.core.tensor_parallel.mappings as mappings
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    random._get_cuda_rng_state = _get_rng_state
    random._set_cuda_rng_state = _set_rng_state
    token_dispatcher.maybe_move_tensor_to_cpu = _move_to_cpu
    # The token dispatcher calls these over the ranks that share an expert.
    mappings._gather_along_first_dim = padded_gather(mappings._gather_along_first_dim)
    mappings._reduce_scatter_along_first_dim = padded_reduce_scatter(
        mappings._reduce_scatter_along_first_dim
    )


def _get_rng_state(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    """Megatron's tracker drives a CUDA generator, which does not exist here."""
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Convert split sizes to numpy, which the all-to-all requires.

    Megatron's function converts CUDA tensors only.
    """
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
