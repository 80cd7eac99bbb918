"""Layout of SGLang's parameters (0.5.23), which fuse checkpoint tensors and split them over ranks.

Attention, MLPs and the vocabulary are split over the tensor-parallel ranks. Experts are divided
among `ep` groups of ranks, and each is split over the ranks of its group.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

import torch

from sglang_bridge.engine import Engine

_PATTERNS: tuple[tuple[re.Pattern[str], str, dict[str, int]], ...] = (
    (
        re.compile(r"(.*\.self_attn)\.([qkv])_proj\.(weight|bias)"),
        "qkv_proj",
        {"q": 0, "k": 1, "v": 2},
    ),
    (
        re.compile(r"(.*\.mlp(?:\.shared_experts)?)\.(gate|up)_proj\.(weight|bias)"),
        "gate_up_proj",
        {"gate": 0, "up": 1},
    ),
)
_EXPERT = re.compile(
    r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight"
)
# Of names without ".weight"
_UNITS = (
    (re.compile(r"(.*\.self_attn)\.[qkv]_proj"), "qkv_proj"),
    (re.compile(r"(.*\.self_attn)\.(?:q_a_proj|kv_a_proj_with_mqa)"), "fused_qkv_a_proj_with_mqa"),
    (re.compile(r"(.*\.(?:mlp|shared_experts|experts\.\d+))\.(?:gate|up)_proj"), "gate_up_proj"),
    (re.compile(r"(.*\.experts\.\d+)\.w[13]"), "w13"),
)
_PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
_VOCABULARY_TENSORS = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
# SGLang pads the vocabulary to a multiple of this, with zero rows, and of `tp` times this if `tp`
# ranks could not share the rows evenly.
_VOCABULARY_MULTIPLE = 64
_ROWS = re.compile(r".*(?:\.self_attn\.q_proj|\.mlp\.(?:gate|up)_proj)\.(?:weight|bias)")
_KEYS_AND_VALUES = re.compile(r".*\.self_attn\.[kv]_proj\.(?:weight|bias)")
_COLUMNS = re.compile(r".*(?:\.self_attn\.o_proj|\.mlp\.down_proj)\.weight")
# Norms and routers
_WHOLE = re.compile(r".*(?:norm|\.gate)\.weight")
_DOWN_KINDS = ("down_proj", "w2")


@dataclass(frozen=True)
class Slot:
    """Place of one checkpoint tensor in an engine parameter.

    count: the number of slots in the parameter. is_expert: its slots hold experts.
    """

    parameter: str
    index: int
    count: int
    is_expert: bool = False


def locate_slot(name: str, *, num_experts: int) -> Slot:
    """Locate a tensor by its Hugging Face name.

    A name of no known fusion is itself a parameter. Raises `ValueError` for an expert that the
    model does not have.
    """
    expert_match = _EXPERT.fullmatch(name)
    if expert_match is not None:
        prefix, expert, kind = expert_match.groups()
        return _expert_slot(name, prefix, int(expert), kind, num_experts)
    for pattern, parameter, order in _PATTERNS:
        match = pattern.fullmatch(name)
        if match is not None:
            return Slot(f"{match[1]}.{parameter}.{match[3]}", order[match[2]], len(order))
    return Slot(name, 0, 1)


def _expert_slot(name: str, prefix: str, expert: int, kind: str, num_experts: int) -> Slot:
    if expert >= num_experts:
        raise ValueError(f"weight {name}: the model has experts 0 to {num_experts - 1}")
    if kind not in _PLACES:
        return Slot(f"{prefix}.w2_weight", expert, num_experts, is_expert=True)
    index = 2 * expert + _PLACES[kind]
    return Slot(f"{prefix}.w13_weight", index, 2 * num_experts, is_expert=True)


def update_unit(name: str) -> str:
    """Name the tensors that must reach an engine in one update, because it fuses them.

    These are q, k and v; gate and up, also of one expert; and the first projections of latent
    attention. SGLang forgets one of these that comes alone (0.5.23,
    `models/deepseek_common/deepseek_weight_loader.py`). A scale belongs to its weight.
    """
    tensor = name.removesuffix("_scale_inv").removesuffix(".weight").removesuffix(".bias")
    for pattern, unit in _UNITS:
        match = pattern.fullmatch(tensor)
        if match is not None:
            return f"{match[1]}.{unit}"
    return tensor


def engine_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which an engine of `dtype` keeps a tensor.

    A router's bias stays in float32, because a rounded bias selects other experts.
    """
    return torch.float32 if name.endswith(".e_score_correction_bias") else dtype


class RankPlace(NamedTuple):
    """One rank of an engine with `tp` ranks, whose experts are divided among `ep` groups."""

    rank: int = 0
    tp: int = 1
    ep: int = 1

    @property
    def expert_shards(self) -> int:
        """The number of ranks that share each expert."""
        return self.tp // self.ep


WHOLE = RankPlace()
"""The rank of an engine that has one."""


def rank_places(engine: Engine) -> tuple[RankPlace, ...]:
    """All ranks of an engine, in order."""
    return tuple(RankPlace(rank, engine.tp, engine.ep) for rank in range(engine.tp))


def first_expert(place: RankPlace, num_experts: int) -> int:
    """The first expert of a rank. It has `num_experts // place.ep`."""
    return place.rank // place.expert_shards * (num_experts // place.ep)


def is_split_known(name: str) -> bool:
    """True if `take_shard` knows how ranks share the tensor of this name."""
    patterns = (_EXPERT, _ROWS, _KEYS_AND_VALUES, _COLUMNS, _WHOLE)
    return name in _VOCABULARY_TENSORS or any(pattern.fullmatch(name) for pattern in patterns)


def take_shard(
    name: str, tensor: torch.Tensor, place: RankPlace, *, num_key_value_heads: int
) -> torch.Tensor:
    """The part of a tensor on one rank, padding included. It may be a view.

    name: the tensor's Hugging Face name. An expert's tensor is cut as if the rank had that expert.
    One for which `is_split_known` is false stays whole.
    num_key_value_heads: of the model. Ranks beyond this number hold copies of heads.

    Raises `ValueError` for a size that the ranks cannot share.
    """
    if name in _VOCABULARY_TENSORS:
        return _cut(name, _pad_rows(tensor, padding_rows(name, len(tensor), place.tp)), 0, place)
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        shard = RankPlace(place.rank % place.expert_shards, place.expert_shards)
        return _cut(name, tensor, 1 if expert[3] in _DOWN_KINDS else 0, shard)
    if _KEYS_AND_VALUES.fullmatch(name):
        parts = min(place.tp, num_key_value_heads)
        return _cut(name, tensor, 0, RankPlace(place.rank * parts // place.tp, parts))
    if _ROWS.fullmatch(name):
        return _cut(name, tensor, 0, place)
    if _COLUMNS.fullmatch(name):
        return _cut(name, tensor, 1, place)
    return tensor


def padding_rows(name: str, rows: int, tp: int = 1) -> int:
    """The number of zero rows that an engine of `tp` ranks appends to this tensor."""
    if name not in _VOCABULARY_TENSORS:
        return 0
    extra = -rows % _VOCABULARY_MULTIPLE
    return extra if (rows + extra) % tp == 0 else -rows % (_VOCABULARY_MULTIPLE * tp)


def _pad_rows(tensor: torch.Tensor, extra: int) -> torch.Tensor:
    if not extra:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(extra, *tensor.shape[1:])])


def _cut(name: str, tensor: torch.Tensor, dimension: int, place: RankPlace) -> torch.Tensor:
    size, rest = divmod(tensor.shape[dimension], place.tp)
    if rest:
        raise ValueError(
            f"weight {name}: {place.tp} ranks of an engine cannot share the "
            f"{tensor.shape[dimension]} of its dimension {dimension}; use a smaller engine.tp"
        )
    return tensor.narrow(dimension, place.rank * size, size)
