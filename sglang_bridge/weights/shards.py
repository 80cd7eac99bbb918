"""The part of each checkpoint tensor that one rank of an SGLang engine holds (0.5.23).

Attention, MLPs and the vocabulary are split over the tensor-parallel ranks. Experts are divided
among `ep` groups of ranks, and each is split over the ranks of its group.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch

from sglang_bridge.engine import Engine
from sglang_bridge.weights.fused_layout import EXPERT, VOCABULARY_TENSORS

# SGLang pads the vocabulary to a multiple of this, with zero rows, and of `tp` times this if `tp`
# ranks could not share the rows evenly.
_VOCABULARY_MULTIPLE = 64
_ROWS = re.compile(r".*(?:\.self_attn\.q_proj|\.mlp\.(?:gate|up)_proj)\.(?:weight|bias)")
_KEYS_AND_VALUES = re.compile(r".*\.self_attn\.[kv]_proj\.(?:weight|bias)")
_COLUMNS = re.compile(r".*(?:\.self_attn\.o_proj|\.mlp\.down_proj)\.weight")
# Norms and routers
_WHOLE = re.compile(r".*(?:norm|\.gate)\.weight")
_DOWN_KINDS = ("down_proj", "w2")


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
    patterns = (EXPERT, _ROWS, _KEYS_AND_VALUES, _COLUMNS, _WHOLE)
    return name in VOCABULARY_TENSORS or any(pattern.fullmatch(name) for pattern in patterns)


def take_shard(
    name: str, tensor: torch.Tensor, place: RankPlace, *, num_key_value_heads: int
) -> torch.Tensor:
    """The part of a tensor on one rank, padding included. It may be a view.

    name: the tensor's Hugging Face name. An expert's tensor is cut as if the rank had that expert.
    One for which `is_split_known` is false stays whole.
    num_key_value_heads: of the model. Ranks beyond this number hold copies of heads.

    Raises `ValueError` for a size that the ranks cannot share.
    """
    if name in VOCABULARY_TENSORS:
        return _cut(name, _pad_rows(tensor, padding_rows(name, len(tensor), place.tp)), 0, place)
    expert = EXPERT.fullmatch(name)
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
    if name not in VOCABULARY_TENSORS:
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
