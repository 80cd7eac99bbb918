"""Layout of SGLang's fused parameters: several checkpoint tensors may share one parameter."""

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
EXPERT = re.compile(
    r"(.*\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w[123])\.weight"
)
"""Name of an expert's tensor: its layer's experts, its number, and its kind."""
# Of names without ".weight"
_UNITS = (
    (re.compile(r"(.*\.self_attn)\.[qkv]_proj"), "qkv_proj"),
    (re.compile(r"(.*\.self_attn)\.(?:q_a_proj|kv_a_proj_with_mqa)"), "fused_qkv_a_proj_with_mqa"),
    (re.compile(r"(.*\.(?:mlp|shared_experts|experts\.\d+))\.(?:gate|up)_proj"), "gate_up_proj"),
    (re.compile(r"(.*\.experts\.\d+)\.w[13]"), "w13"),
)
_PLACES = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}
VOCABULARY_TENSORS = frozenset({"model.embed_tokens.weight", "lm_head.weight"})


@dataclass(frozen=True)
class Slot:
    """Place of one checkpoint tensor in an engine parameter.

    count: the number of slots in the parameter. is_expert: its slots are those of experts.
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
    expert_match = EXPERT.fullmatch(name)
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
    attention, of which SGLang forgets one that comes alone (0.5.23,
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
