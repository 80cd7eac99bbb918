"""The parameters of a rank with their places in a Hugging Face checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module

from megatron_rl.mcore.weights.layout import ParameterLayout, layout_of, shard
from megatron_rl.models.families import parameter_names
from megatron_rl.models.names import Fusion, Names
from megatron_rl.models.shape import ModelShape
from sglang_bridge.weights.fused_layout import update_unit

_EMBEDDING = "embedding.word_embeddings.weight"
_EXPERT_BIAS = "mlp.router.expert_bias"


@dataclass(frozen=True)
class PlacedParameter:
    """A parameter of a model chunk, and its place in the whole model.

    name: the name in the model chunk.
    weight: this rank's tensor.
    names: the Hugging Face names of the model's family.
    layer_offset: the index in the whole model of the chunk's first layer.
    experts_per_rank: the number of local experts of each rank.
    is_tied_copy: True for the last stage's copy of tied embeddings. The original belongs to the
        first stage.
    is_frozen: True for a tensor that is not trained and keeps its dtype.
    """

    name: str
    weight: torch.Tensor
    names: Names
    layer_offset: int
    experts_per_rank: int
    is_tied_copy: bool
    is_frozen: bool

    def layout(self, ep_rank: int) -> ParameterLayout:
        """Return the layout of this parameter on expert-parallel rank `ep_rank`."""
        name = _EMBEDDING if self.is_tied_copy else self.name
        expert_offset = ep_rank * self.experts_per_rank
        return layout_of(
            name, self.names, layer_offset=self.layer_offset, expert_offset=expert_offset
        )

    def part_of(self, whole: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
        """Return this rank's shard of the whole parameter. Rows that pad the vocabulary are 0."""
        rank, size = tensor_rank(layout)
        if layout.fusion is Fusion.VOCABULARY:
            whole = F.pad(whole, (0, 0, 0, self.weight.shape[0] * size - whole.shape[0]))
        return shard(layout.fusion, whole, rank, size)

    def whole_shape(self, layout: ParameterLayout) -> tuple[int, ...]:
        """Return the shape of the whole parameter, with rows that pad the vocabulary."""
        if layout.fusion is Fusion.REPLICATED:
            return tuple(self.weight.shape)
        rows, columns = self.weight.shape
        _, size = tensor_rank(layout)
        return (rows, columns * size) if layout.fusion is Fusion.COLUMNS else (rows * size, columns)

    def convert(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        """Return the parameter, or a part of it, in the dtype in which engines get it.

        dtype: of weights that are trained; None keeps theirs. Frozen ones always keep theirs.
        """
        return tensor if dtype is None or self.is_frozen else tensor.to(dtype)

    def num_whole_bytes(self, layout: ParameterLayout, dtype: torch.dtype | None) -> int:
        """The bytes of the whole parameter after `convert`."""
        if dtype is None or self.is_frozen:
            dtype = self.weight.dtype
        return math.prod(self.whole_shape(layout)) * dtype.itemsize


def placed_parameters(
    models: Sequence[torch.nn.Module], shape: ModelShape
) -> Iterator[PlacedParameter]:
    """Yield every parameter of this rank's chunks and the expert biases of their routers.

    Expert biases are buffers, not parameters, and are frozen.
    """
    experts_per_rank = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
    names = parameter_names(shape)
    for chunk in models:
        inner = unwrap(chunk)
        layers = inner.decoder.layers
        layer_offset = layers[0].layer_number - 1 if len(layers) else 0
        for name, weight in inner.named_parameters():
            is_tied_copy = name == "output_layer.weight" and shape.tie_word_embeddings
            yield PlacedParameter(
                name, weight, names, layer_offset, experts_per_rank, is_tied_copy, is_frozen=False
            )
        for name, bias in inner.named_buffers():
            if name.endswith(_EXPERT_BIAS):
                yield PlacedParameter(
                    name,
                    bias,
                    names,
                    layer_offset,
                    experts_per_rank,
                    is_tied_copy=False,
                    is_frozen=True,
                )


def in_update_order(parameters: Iterable[PlacedParameter]) -> list[PlacedParameter]:
    """Put parameters that engines fuse next to each other, in the place of the first one."""
    units: dict[str, list[PlacedParameter]] = {}
    for parameter in parameters:
        unit = update_unit(parameter.layout(ep_rank=0).hf_names[0])
        units.setdefault(unit, []).append(parameter)
    return [parameter for unit in units.values() for parameter in unit]


def tensor_rank(layout: ParameterLayout) -> tuple[int, int]:
    """Return this rank's place in the tensor-parallel group of a parameter, and the group's size.

    Experts have a group of their own.
    """
    if layout.expert is not None:
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def unwrap(model: torch.nn.Module) -> Any:
    """Return the GPTModel inside Megatron's wrappers."""
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    return model
