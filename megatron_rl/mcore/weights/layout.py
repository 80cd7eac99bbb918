"""How one Megatron parameter corresponds to Hugging Face tensors, and how both are cut and joined."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.models.names import OUTER, Fusion, Names
from megatron_rl.models.shape import ModelShape


@dataclass(frozen=True)
class ParameterLayout:
    """hf_names in the order they are fused.

    expert: the local expert index, None outside the experts.
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
    """The layout of a Megatron parameter. layer_offset: global index of this chunk's layer 0;
    expert_offset likewise.

    names: of the model's family. Raises KeyError for a parameter without a Hugging Face
    counterpart.
    """
    if name in OUTER:
        return ParameterLayout(*OUTER[name])
    match = _LAYER.fullmatch(name)
    layer, inner = (int(match[1]) + layer_offset, match[2]) if match else (0, name)
    expert, local = _LOCAL_EXPERT.fullmatch(inner) or _GROUPED_EXPERT.fullmatch(inner), None
    if expert is not None:
        inner, local = (
            "".join(part for part in expert.groups() if not part.isdigit()),
            int(expert["expert"]),
        )
    if match is None or inner not in names:
        raise KeyError(f"parameter {name} has no Hugging Face counterpart")
    inside, fusion = names[inner]
    number = "" if local is None else str(local + expert_offset)
    hf_names = tuple(
        f"model.layers.{layer}.{hf_name.replace('{expert}', number)}" for hf_name in inside
    )
    return ParameterLayout(hf_names, fusion, local)


def join(fusion: Fusion, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """Fuse Hugging Face tensors into one full (unsharded) parameter."""
    if fusion is Fusion.GATED:
        return torch.cat(list(tensors))
    if fusion is Fusion.QKV:
        groups, dim, hidden = shape.num_key_value_heads, shape.head_dim, tensors[0].shape[1]
        return torch.cat([t.reshape(groups, -1, dim, hidden) for t in tensors], dim=1).reshape(
            -1, hidden
        )
    return tensors[0]


def split(fusion: Fusion, weight: torch.Tensor, shape: ModelShape) -> list[torch.Tensor]:
    """The inverse of `join`; results are contiguous."""
    if fusion is Fusion.GATED:
        return [part.contiguous() for part in weight.chunk(2)]
    if fusion is Fusion.QKV:
        groups, dim, hidden = shape.num_key_value_heads, shape.head_dim, weight.shape[1]
        grouped = weight.reshape(groups, -1, dim, hidden)
        queries = shape.num_attention_heads // groups
        parts = grouped.split([queries, 1, 1], dim=1)
        return [part.reshape(-1, hidden) for part in parts]
    return [weight.contiguous()]


def shard(fusion: Fusion, weight: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """Tensor-parallel shard `rank` of `size` of a full parameter."""
    if size == 1 or fusion is Fusion.REPLICATED:
        return weight
    if fusion is Fusion.COLUMNS:
        return weight.chunk(size, dim=1)[rank]
    if fusion is Fusion.GATED:
        return torch.cat([half.chunk(size)[rank] for half in weight.chunk(2)])
    return weight.chunk(size)[rank]


def join_shards(fusion: Fusion, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of `shard`."""
    if len(shards) == 1 or fusion is Fusion.REPLICATED:
        return shards[0]
    if fusion is Fusion.COLUMNS:
        return torch.cat(list(shards), dim=1)
    if fusion is Fusion.GATED:
        halves = [s.chunk(2) for s in shards]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves])
    return torch.cat(list(shards))
