"""Qwen3-MoE: experts in some or all layers, a softmax router, and normalised queries and keys."""

from __future__ import annotations

from typing import Any

from megatron_rl.models.config_json import (
    REMEDY,
    Count,
    DecoderConfig,
    Index,
    check_topk,
    common_shape,
    format_json,
    parse_config,
    refuse_unsupported,
)
from megatron_rl.models.names import (
    ATTENTION,
    DENSE_MLP,
    EXPERTS,
    LAYER_NORMS,
    QK_NORMS,
    Names,
    router,
)
from megatron_rl.models.shape import ModelShape, Router

ARCHITECTURE = "Qwen3MoeForCausalLM"
NAMES: Names = {
    **LAYER_NORMS,
    **ATTENTION,
    **QK_NORMS,
    **DENSE_MLP,
    **router("mlp.gate.weight"),
    **EXPERTS,
}


class _Config(DecoderConfig, kw_only=True):
    moe_intermediate_size: Count
    num_experts: Count | None = None  # transformers 4
    num_local_experts: Count | None = None  # transformers 5
    num_experts_per_tok: Count
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[Index, ...] = ()
    use_sliding_window: bool = False

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(
            layer
            for layer in range(self.num_hidden_layers)
            if layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0
        )


def shape(raw: dict[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises ValueError naming key, value, rule and remedy.
    """
    config = parse_config(raw, _Config)
    refuse_unsupported(
        config,
        use_sliding_window=(config.use_sliding_window, "attention is full and causal"),
        norm_topk_prob=(
            config.norm_topk_prob and config.num_experts_per_tok == 1,
            "with num_experts_per_tok=1 the normalized weight is always 1, and the router would "
            "have no gradient",
        ),
    )
    common = common_shape(config)
    experts = config.num_experts or config.num_local_experts
    if experts is None:
        raise ValueError(f"num_experts is missing: a {ARCHITECTURE} has experts; {REMEDY}")
    last = config.num_hidden_layers - 1
    dense = config.mlp_only_layers
    if max(dense, default=0) > last:
        raise ValueError(
            f"mlp_only_layers={format_json(list(dense))}: expected layers from 0 to {last}; "
            f"{REMEDY}"
        )
    if not config.moe_layers:
        raise ValueError(
            f"mlp_only_layers={format_json(list(dense))} and "
            f"decoder_sparse_step={config.decoder_sparse_step}: no layer has experts; "
            "choose another checkpoint"
        )
    check_topk(config.num_experts_per_tok, experts, "num_experts")
    return ModelShape(
        architecture=ARCHITECTURE,
        qk_norm=True,
        moe_layers=config.moe_layers,
        num_experts=experts,
        topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        router=Router(normalizes_weights=config.norm_topk_prob),
        **common,
    )
