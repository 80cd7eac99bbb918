"""Mixtral: experts in every layer, with a softmax over the selected experts.

Queries and keys are not normalised.
"""

from __future__ import annotations

from typing import Any

from megatron_rl.models.config_json import (
    Count,
    DecoderConfig,
    NotNegative,
    Theta,
    check_topk,
    common_shape,
    parse_config,
    refuse_unsupported,
)
from megatron_rl.models.names import ATTENTION, LAYER_NORMS, Names, mlp, router
from megatron_rl.models.shape import ModelShape

ARCHITECTURE = "MixtralForCausalLM"
_EXPERT = "block_sparse_moe.experts.{expert}."
NAMES: Names = {
    **LAYER_NORMS,
    **ATTENTION,
    **router("block_sparse_moe.gate.weight"),
    **mlp("mlp.experts.", _EXPERT, gate="w1", up="w3", down="w2"),
}


class _Config(DecoderConfig, kw_only=True):
    num_local_experts: Count = 8
    num_experts_per_tok: Count = 2
    sliding_window: Count | None = None
    router_jitter_noise: NotNegative = 0.0
    rms_norm_eps: NotNegative = 1e-5
    rope_theta: Theta = 1e6


def shape(raw: dict[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises ValueError naming key, value, rule and remedy.
    """
    config = parse_config(raw, _Config)
    has_other_head_dim = (
        config.head_dim is not None
        and config.head_dim * config.num_attention_heads != config.hidden_size
    )
    refuse_unsupported(
        config,
        sliding_window=(config.sliding_window is not None, "attention is full and causal"),
        router_jitter_noise=(
            config.router_jitter_noise > 0,
            "noise would make the trained policy differ from the sampled one",
        ),
        num_experts_per_tok=(
            config.num_experts_per_tok == 1,
            "the weight of a single expert is always 1, and the router would have no gradient",
        ),
        head_dim=(
            has_other_head_dim,
            "SGLang requires head_dim = hidden_size / num_attention_heads",
        ),
    )
    check_topk(config.num_experts_per_tok, config.num_local_experts, "num_local_experts")
    return ModelShape(
        architecture=ARCHITECTURE,
        qk_norm=False,
        moe_layers=tuple(range(config.num_hidden_layers)),
        num_experts=config.num_local_experts,
        topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.intermediate_size,
        **common_shape(config),
    )
