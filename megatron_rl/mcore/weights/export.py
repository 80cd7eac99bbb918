"""Iterates over a rank's weights under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.mcore.weights.layout import join_shards, split
from megatron_rl.mcore.weights.parameters import PlacedParameter, placed_parameters
from megatron_rl.models.names import Fusion
from megatron_rl.models.shape import ModelShape

NamedTensors = Iterator[tuple[str, torch.Tensor]]


@torch.no_grad()
def iterate_hf_weights(
    models: Sequence[torch.nn.Module], shape: ModelShape, dtype: torch.dtype | None = None
) -> NamedTensors:
    """Yield (name, whole tensor) for every tensor of this pipeline stage.

    Collective: gathers expert weights over the expert-parallel group and shards over the
    tensor-parallel groups. All ranks of a stage must exhaust it; they yield in the same order.

    dtype: converts weights that are trained; None keeps their dtype. Frozen weights always keep
        their dtype.
    """
    for parameter in placed_parameters(models, shape):
        if parameter.is_tied_copy:
            continue
        layout = parameter.layout(ep_rank=0)
        weight = parameter.weight.detach()
        is_expert = layout.expert is not None
        if layout.fusion is not Fusion.REPLICATED:
            weight = join_shards(layout.fusion, _gather(weight, _tensor_group(is_expert)))
        weights = [weight]
        if is_expert:
            weights = _gather(weight, parallel_state.get_expert_model_parallel_group())
        for ep_rank, rank_weight in enumerate(weights):
            yield from hf_tensors(parameter, ep_rank, rank_weight, shape, dtype)


def hf_tensors(
    parameter: PlacedParameter,
    ep_rank: int,
    weight: torch.Tensor,
    shape: ModelShape,
    dtype: torch.dtype | None,
) -> NamedTensors:
    """Yield the named Hugging Face tensors that one parameter is fused from, without padding.

    ep_rank: the expert-parallel rank that holds the parameter.
    weight: the whole parameter, joined from its shards.
    dtype: converts weights that are trained; None keeps their dtype.
    """
    layout = parameter.layout(ep_rank)
    for name, tensor in zip(layout.hf_names, split(layout.fusion, weight, shape), strict=True):
        if layout.fusion is Fusion.VOCABULARY:
            tensor = tensor[: shape.vocab_size]
        yield name, parameter.convert(tensor, dtype)


def _tensor_group(is_expert: bool) -> dist.ProcessGroup:
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _gather(weight: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Return the weight of every rank of a group, in rank order. Collective."""
    size = dist.get_world_size(group)
    if size == 1:
        return [weight]
    weight = weight.contiguous()
    weights = [torch.empty_like(weight) for _ in range(size)]
    dist.all_gather(weights, weight, group=group)
    return weights
