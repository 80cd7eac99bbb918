"""How one Megatron parameter corresponds to Hugging Face tensors, and how both are cut and joined."""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_rl.models.shape import ModelShape


class Fusion(enum.Enum):
    """How Hugging Face tensors are fused into one parameter, and along which axis tensor parallelism cuts it."""

    REPLICATED = "replicated"
    ROWS = "rows"  # vocabulary and other column-parallel weights: cut along axis 0
    COLUMNS = "columns"  # row-parallel weights: cut along axis 1
    QKV = "qkv"  # q, k, v interleaved by query group: cut by group along axis 0
    GATED = "gated"  # gate over up; every shard holds its part of both


@dataclass(frozen=True)
class ParameterLayout:
    """hf_names in the order they are fused. expert: the local expert index, None outside the experts."""

    hf_names: tuple[str, ...]
    fusion: Fusion
    expert: int | None = None


_OUTER = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", Fusion.ROWS),
    "decoder.final_layernorm.weight": ("model.norm.weight", Fusion.REPLICATED),
    "output_layer.weight": ("lm_head.weight", Fusion.ROWS),
}
_INNER = {
    "input_layernorm.weight": ("input_layernorm.weight", Fusion.REPLICATED),
    "self_attention.linear_qkv.layer_norm_weight": ("input_layernorm.weight", Fusion.REPLICATED),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", Fusion.REPLICATED),
    "mlp.linear_fc1.layer_norm_weight": ("post_attention_layernorm.weight", Fusion.REPLICATED),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", Fusion.REPLICATED),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", Fusion.REPLICATED),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", Fusion.COLUMNS),
    "mlp.router.weight": ("mlp.gate.weight", Fusion.REPLICATED),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", Fusion.COLUMNS),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_LOCAL_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<expert>\d+)\.linear_fc(?P<fc>[12])\.weight")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.linear_fc(?P<fc>[12])\.weight(?P<expert>\d+)")


def layout_of(name: str, *, layer_offset: int, expert_offset: int) -> ParameterLayout:
    """The layout of a Megatron parameter. layer_offset: global index of this chunk's layer 0; expert_offset likewise.

    Raises KeyError for a parameter without a Hugging Face counterpart.
    """
    if name in _OUTER:
        hf_name, fusion = _OUTER[name]
        return ParameterLayout((hf_name,), fusion)
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(f"parameter {name} has no Hugging Face counterpart")
    prefix, inner = f"model.layers.{int(match[1]) + layer_offset}.", match[2]
    if inner in _INNER:
        hf_name, fusion = _INNER[inner]
        return ParameterLayout((prefix + hf_name,), fusion)
    if inner == "self_attention.linear_qkv.weight":
        return ParameterLayout(tuple(f"{prefix}self_attn.{x}_proj.weight" for x in "qkv"), Fusion.QKV)
    if inner == "mlp.linear_fc1.weight":
        return ParameterLayout(tuple(f"{prefix}mlp.{x}_proj.weight" for x in ("gate", "up")), Fusion.GATED)
    expert_match = _LOCAL_EXPERT.fullmatch(inner) or _GROUPED_EXPERT.fullmatch(inner)
    if expert_match is None:
        raise KeyError(f"parameter {name} has no Hugging Face counterpart")
    local = int(expert_match["expert"])
    experts = f"{prefix}mlp.experts.{local + expert_offset}."
    if expert_match["fc"] == "1":
        return ParameterLayout((experts + "gate_proj.weight", experts + "up_proj.weight"), Fusion.GATED, local)
    return ParameterLayout((experts + "down_proj.weight",), Fusion.COLUMNS, local)


def join(fusion: Fusion, tensors: Sequence[torch.Tensor], shape: ModelShape) -> torch.Tensor:
    """Fuse Hugging Face tensors into one full (unsharded) parameter."""
    if fusion is Fusion.GATED:
        return torch.cat(list(tensors))
    if fusion is Fusion.QKV:
        groups, dim, hidden = shape.num_key_value_heads, shape.head_dim, tensors[0].shape[1]
        return torch.cat([t.reshape(groups, -1, dim, hidden) for t in tensors], dim=1).reshape(-1, hidden)
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
