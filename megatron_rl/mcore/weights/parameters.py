"""A rank's parameters with their place in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module

from megatron_rl.mcore.weights.layout import ParameterLayout, layout_of, shard
from megatron_rl.models.families import names_of
from megatron_rl.models.names import Fusion, Names
from megatron_rl.models.shape import ModelShape

_EMBEDDING = "embedding.word_embeddings.weight"
_FROZEN = "mlp.router.expert_bias"


@dataclass(frozen=True)
class PlacedParameter:
    """`experts_per_rank` is the number of local experts, by which expert names advance from rank to
    rank.

    copy: the last stage's own copy of tied embeddings; the tensor belongs to the first stage.
    frozen: not trained, and kept in its own dtype.
    """

    name: str
    weight: torch.Tensor
    names: Names
    layer_offset: int
    experts_per_rank: int
    copy: bool
    frozen: bool

    def layout(self, ep_rank: int) -> ParameterLayout:
        """The layout as seen from expert-parallel rank `ep_rank`."""
        name = _EMBEDDING if self.copy else self.name
        expert_offset = ep_rank * self.experts_per_rank
        return layout_of(
            name, self.names, layer_offset=self.layer_offset, expert_offset=expert_offset
        )

    def part_of(self, full: torch.Tensor, layout: ParameterLayout) -> torch.Tensor:
        """This rank's shard of the whole parameter; rows that pad the vocabulary are zero."""
        rank, size = tensor_rank(layout)
        if layout.fusion is Fusion.VOCABULARY:
            full = F.pad(full, (0, 0, 0, self.weight.shape[0] * size - full.shape[0]))
        return shard(layout.fusion, full, rank, size)

    def whole_shape(self, layout: ParameterLayout) -> tuple[int, ...]:
        """The shape of what all ranks hold together, rows that pad the vocabulary included."""
        if layout.fusion is Fusion.REPLICATED:
            return tuple(self.weight.shape)
        rows, columns = self.weight.shape
        _, size = tensor_rank(layout)
        return (rows, columns * size) if layout.fusion is Fusion.COLUMNS else (rows * size, columns)


def placed_parameters(
    models: Sequence[torch.nn.Module], shape: ModelShape
) -> Iterator[PlacedParameter]:
    """Every parameter of this rank's chunks, and their routers' biases, which are buffers."""
    experts_per_rank = shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
    names = names_of(shape)
    for chunk in models:
        inner = unwrap(chunk)
        layers = inner.decoder.layers
        offset = layers[0].layer_number - 1 if len(layers) else 0
        for name, weight in inner.named_parameters():
            copy = name == "output_layer.weight" and shape.tie_word_embeddings
            yield PlacedParameter(name, weight, names, offset, experts_per_rank, copy, frozen=False)
        for name, bias in inner.named_buffers():
            if name.endswith(_FROZEN):
                yield PlacedParameter(
                    name, bias, names, offset, experts_per_rank, copy=False, frozen=True
                )


def tensor_rank(layout: ParameterLayout) -> tuple[int, int]:
    """Which of how many ranks this one is among those that share a parameter."""
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
    """The GPTModel inside Megatron's wrappers."""
    while isinstance(model, DistributedDataParallel | Float16Module):
        model = model.module
    return model
