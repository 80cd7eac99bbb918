"""Maps one Megatron parameter to Hugging Face tensors, and cuts and joins both."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.models.names import OUTER, Fusion, Names
from megatron_rl.models.shape import ModelShape


@dataclass(frozen=True)
class ParameterLayout:
    """The Hugging Face tensors of one Megatron parameter.

    hf_names: their names in the order in which they are fused.
    fusion: how they are fused.
    expert: the local index of the expert; None outside experts.
    """

    hf_names: tuple[str, ...]
    fusion: Fusion
    expert: int | None = None


_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_LOCAL_EXPERT = re.compile(
    r"(mlp\.experts\.)local_experts\.(?P<expert>\d+)\.(linear_fc[12]\.weight)"
)
_GROUPED_EXPERT = re.compile(r"(mlp\.experts\.)(linear_fc[12]\.weight)(?P<expert>\d+)")


def layout_of(name: str, names: Names, *, layer_offset: int, expert_offset: int) -> ParameterLayout:
    """Return the layout of a Megatron parameter.

    name: the parameter's name within its model chunk.
    names: the names of the model's family.
    layer_offset: the index in the whole model of the chunk's first layer.
    expert_offset: the index in the layer of the rank's first expert.

    Raises KeyError for a parameter without a Hugging Face counterpart.
    """
    if name in OUTER:
        return ParameterLayout(*OUTER[name])
    layer_match = _LAYER.fullmatch(name)
    if layer_match is None:
        raise KeyError(f"parameter {name} has no Hugging Face counterpart")
    layer = int(layer_match[1]) + layer_offset
    inner, expert = _split_expert(layer_match[2])
    if inner not in names:
        raise KeyError(f"parameter {name} has no Hugging Face counterpart")
    templates, fusion = names[inner]
    number = "" if expert is None else str(expert + expert_offset)
    hf_names = tuple(
        f"model.layers.{layer}.{template.replace('{expert}', number)}" for template in templates
    )
    return ParameterLayout(hf_names, fusion, expert)


def _split_expert(name: str) -> tuple[str, int | None]:
    """Split a name within a layer into the name without expert and the local expert index."""
    match = _LOCAL_EXPERT.fullmatch(name) or _GROUPED_EXPERT.fullmatch(name)
    if match is None:
        return name, None
    parts = [part for part in match.groups() if not part.isdigit()]
    return "".join(parts), int(match["expert"])


def join(fusion: Fusion, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """Fuse Hugging Face tensors into one whole (unsharded) parameter."""
    if fusion is Fusion.GATED:
        return torch.cat(list(tensors))
    if fusion is Fusion.QKV:
        groups = shape.num_key_value_heads
        hidden_size = tensors[0].shape[1]
        by_group = [t.reshape(groups, -1, shape.head_dim, hidden_size) for t in tensors]
        return torch.cat(by_group, dim=1).reshape(-1, hidden_size)
    return tensors[0]


def split(fusion: Fusion, weight: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """Invert `join`. The results are contiguous.

    weight: a whole parameter, or one shard of it. The results are then shards along their rows, or
    along their columns for `Fusion.COLUMNS`.
    """
    if fusion is Fusion.GATED:
        return [part.contiguous() for part in weight.chunk(2)]
    if fusion is Fusion.QKV:
        queries = shape.num_attention_heads // shape.num_key_value_heads
        hidden_size = weight.shape[1]
        by_group = weight.reshape(-1, queries + 2, shape.head_dim, hidden_size)
        parts = by_group.split([queries, 1, 1], dim=1)
        return [part.reshape(-1, hidden_size) for part in parts]
    return [weight.contiguous()]


def shard(fusion: Fusion, weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Return shard `rank` of `size` tensor-parallel shards of a whole parameter."""
    if size == 1 or fusion is Fusion.REPLICATED:
        return weight
    if fusion is Fusion.COLUMNS:
        return weight.chunk(size, dim=1)[rank]
    if fusion is Fusion.GATED:
        return torch.cat([half.chunk(size)[rank] for half in weight.chunk(2)])
    return weight.chunk(size)[rank]


def join_shards(fusion: Fusion, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Invert `shard`: join the shards of all ranks, in rank order."""
    if len(shards) == 1 or fusion is Fusion.REPLICATED:
        return shards[0]
    if fusion is Fusion.COLUMNS:
        return torch.cat(list(shards), dim=1)
    if fusion is Fusion.GATED:
        halves = [part.chunk(2) for part in shards]
        gates = [half[0] for half in halves]
        ups = [half[1] for half in halves]
        return torch.cat(gates + ups)
    return torch.cat(list(shards))
