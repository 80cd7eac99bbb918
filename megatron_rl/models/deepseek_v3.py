"""DeepSeek-V3: latent attention, shared experts, and a sigmoid router with groups and a bias.

The first layers have no experts. The norms inside the attention use `rms_norm_eps`, as in SGLang.
transformers uses 1e-6 there, which equals `rms_norm_eps` in DeepSeek's published checkpoints.
"""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from megatron_rl.models.config_json import (
    REMEDY,
    Count,
    DecoderConfig,
    Index,
    check_topk,
    common_shape,
    parse_config,
    refuse_unsupported,
)
from megatron_rl.models.names import (
    DENSE_MLP,
    EXPERTS,
    LAYER_NORMS,
    OUTPUT,
    Fusion,
    Names,
    mlp,
    router,
)
from megatron_rl.models.shape import LatentAttention, ModelShape, Router, Yarn

ARCHITECTURE = "DeepseekV3ForCausalLM"
_LATENT: Names = {
    f"self_attention.{name}": ((f"self_attn.{tensor}.weight",), fusion)
    for name, tensor, fusion in (
        ("linear_q_proj.weight", "q_proj", Fusion.ROWS),
        ("linear_q_down_proj.weight", "q_a_proj", Fusion.ROWS),
        ("linear_q_up_proj.weight", "q_b_proj", Fusion.ROWS),
        ("linear_kv_down_proj.weight", "kv_a_proj_with_mqa", Fusion.ROWS),
        ("linear_kv_up_proj.weight", "kv_b_proj", Fusion.ROWS),
        ("q_layernorm.weight", "q_a_layernorm", Fusion.REPLICATED),
        ("linear_q_up_proj.layer_norm_weight", "q_a_layernorm", Fusion.REPLICATED),
        ("kv_layernorm.weight", "kv_a_layernorm", Fusion.REPLICATED),
        ("linear_kv_up_proj.layer_norm_weight", "kv_a_layernorm", Fusion.REPLICATED),
    )
}
NAMES: Names = {
    **LAYER_NORMS,
    **_LATENT,
    **OUTPUT,
    **DENSE_MLP,
    **router("mlp.gate.weight"),
    "mlp.router.expert_bias": (("mlp.gate.e_score_correction_bias",), Fusion.REPLICATED),
    **EXPERTS,
    **mlp("mlp.shared_experts.", "mlp.shared_experts."),
}


class _Config(DecoderConfig, kw_only=True):
    moe_intermediate_size: Count
    n_routed_experts: Count
    num_experts_per_tok: Count
    n_shared_experts: Count = 1
    first_k_dense_replace: Index = 3
    moe_layer_freq: Count = 1
    n_group: Count = 8
    topk_group: Count = 4
    routed_scaling_factor: Annotated[float, Meta(gt=0, le=1e30)] = 2.5
    norm_topk_prob: bool = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    q_lora_rank: Count | None = None  # null: queries are not compressed
    kv_lora_rank: Count
    qk_nope_head_dim: Count
    qk_rope_head_dim: Count
    v_head_dim: Count
    rope_interleave: bool = True
    num_nextn_predict_layers: Index = 0

    @property
    def router(self) -> Router:
        has_groups = self.topk_group < self.n_group
        return Router(
            score="sigmoid",
            scaling=self.routed_scaling_factor,
            groups=self.n_group if has_groups else 1,
            group_topk=self.topk_group if has_groups else 1,
            bias=True,
        )


def shape(raw: dict[str, Any]) -> ModelShape:
    """Return the shape that a config.json describes.

    Raises ValueError naming key, value, rule and remedy.
    """
    config = parse_config(raw, _Config)
    heads = config.num_attention_heads
    refuse_unsupported(
        config,
        ropes=("default", "yarn"),
        num_key_value_heads=(
            config.num_key_value_heads not in (None, heads),
            "latent attention has one key-value head for each query head",
        ),
        scoring_func=(config.scoring_func != "sigmoid", "the router's scores are sigmoids"),
        topk_method=(
            config.topk_method != "noaux_tc",
            "experts are selected by score and bias, within groups",
        ),
        norm_topk_prob=(
            not config.norm_topk_prob,
            "Megatron-Core normalizes the scores of the selected experts",
        ),
        num_experts_per_tok=(
            config.num_experts_per_tok == 1,
            "Megatron-Core does not normalize the score of a single expert",
        ),
        moe_layer_freq=(
            config.moe_layer_freq != 1,
            "every layer after the dense ones must have experts",
        ),
        rope_interleave=(not config.rope_interleave, "rotary dimensions are interleaved"),
        num_nextn_predict_layers=(
            config.num_nextn_predict_layers > 0,
            "multi-token prediction layers are not trained (set it to 0 to leave them out)",
        ),
    )
    check_topk(config.num_experts_per_tok, config.n_routed_experts, "n_routed_experts")
    _check_groups(config)
    plain_dim = config.qk_nope_head_dim
    rotary_dim = config.qk_rope_head_dim
    head_dim = plain_dim + rotary_dim
    common = common_shape(config) | {"num_key_value_heads": heads, "head_dim": head_dim}
    return ModelShape(
        architecture=ARCHITECTURE,
        qk_norm=False,
        latent=LatentAttention(
            q_rank=config.q_lora_rank,
            kv_rank=config.kv_lora_rank,
            plain_dim=plain_dim,
            rotary_dim=rotary_dim,
            value_dim=config.v_head_dim,
            yarn=_yarn(config),
        ),
        moe_layers=tuple(range(config.first_k_dense_replace, config.num_hidden_layers)),
        num_experts=config.n_routed_experts,
        topk=config.num_experts_per_tok,
        moe_ffn_hidden_size=config.moe_intermediate_size,
        shared_ffn_hidden_size=config.moe_intermediate_size * config.n_shared_experts,
        router=config.router,
        **common,
    )


def _yarn(config: _Config) -> Yarn | None:
    rope = config.rope
    if rope.kind != "yarn":
        return None
    if (
        rope.factor is None
        or rope.original_max_position_embeddings is None
        or not rope.mscale * rope.mscale_all_dim
    ):
        raise ValueError(
            "rope type 'yarn': factor, original_max_position_embeddings, mscale and "
            f"mscale_all_dim are required and must not be 0; {REMEDY}"
        )
    return Yarn(
        rope.factor,
        rope.original_max_position_embeddings,
        rope.beta_fast,
        rope.beta_slow,
        rope.mscale,
        rope.mscale_all_dim,
    )


def _check_groups(config: _Config) -> None:
    """Raise ValueError for expert groups that are impossible or that Megatron-Core ranks otherwise.

    Megatron-Core ranks a group by its best topk // topk_group experts, and transformers and SGLang
    rank it by its best two.
    """
    experts = config.n_routed_experts
    topk = config.num_experts_per_tok
    groups = config.n_group
    topk_groups = config.topk_group
    if config.first_k_dense_replace >= config.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace={config.first_k_dense_replace}: no layer has experts; "
            "choose another checkpoint"
        )
    experts_per_group = experts // groups
    if experts % groups or topk_groups > groups or topk > experts_per_group * topk_groups:
        raise ValueError(
            f"n_group={groups}: {topk} experts a token are not possible with {experts} experts in "
            f"{groups} groups, because {topk_groups} of them are selected; {REMEDY}"
        )
    ranking_experts = topk // topk_groups
    if topk_groups < groups and ranking_experts != 2:
        raise ValueError(
            f"topk_group={topk_groups} is not supported: Megatron-Core would rank groups by their "
            f"best {ranking_experts} experts, but the model ranks them by two; "
            "choose another checkpoint"
        )
