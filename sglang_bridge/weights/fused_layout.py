"""Where SGLang keeps each tensor of a checkpoint: several may share one engine parameter."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

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
_PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
# SGLang pads the vocabulary to a multiple of this at tensor-parallel size 1, with zero rows.
_VOCABULARY_MULTIPLE = 64
_VOCABULARY_TENSORS = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True)
class Slot:
    """One checkpoint tensor's place. count: how many slots its engine parameter has."""

    parameter: str
    index: int
    count: int


def locate_slot(name: str, *, num_experts: int) -> Slot:
    """The place of a tensor with this Hugging Face name; a name of no known fusion is a parameter
    of its own.
    """
    if match := _EXPERT.fullmatch(name):
        prefix, expert, kind = match[1], int(match[2]), match[3]
        if expert >= num_experts:
            raise ValueError(f"weight {name}: the model has experts 0 to {num_experts - 1}")
        if kind not in _PLACES:
            return Slot(f"{prefix}.w2_weight", expert, num_experts)
        return Slot(f"{prefix}.w13_weight", 2 * expert + _PLACES[kind], 2 * num_experts)
    for pattern, fused, order in _PATTERNS:
        if match := pattern.fullmatch(name):
            return Slot(f"{match[1]}.{fused}.{match[3]}", order[match[2]], len(order))
    return Slot(name, 0, 1)


def padding_rows(name: str, rows: int) -> int:
    """How many zero rows the engine holds after this tensor's."""
    return -rows % _VOCABULARY_MULTIPLE if name in _VOCABULARY_TENSORS else 0


def held_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """What an engine of `dtype` keeps a tensor in: a router's bias whole, for a rounded one chooses
    other experts.
    """
    return torch.float32 if name.endswith(".e_score_correction_bias") else dtype
