"""Tiny models of every family, of sizes that Transformer Engine's kernels take on a GPU.

Head sizes are multiples of 8, and every matrix has multiples of 32 rows and columns, which FP8
needs. Latent attention has powers of two, for which Megatron has a fused rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelShape
from tests.support.tiny_families import randomize_weights

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 2,
    "beta_slow": 0.5,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}


def qwen3_moe() -> Any:
    """Build a model with a dense layer and one with experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_COMMON, **experts, norm_topk_prob=True, head_dim=16, mlp_only_layers=[0])
    )


def qwen3() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_COMMON, head_dim=16))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = _COMMON | {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    return MixtralForCausalLM(MixtralConfig(**config))


def deepseek_v3() -> Any:
    """Build a model with a dense layer, shared experts, groups of experts and YaRN."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    changes = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "v_head_dim": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "rope_parameters": _YARN,
    }
    return DeepseekV3ForCausalLM(DeepseekV3Config(**(_COMMON | changes)))


FAMILIES: dict[str, Callable[[], Any]] = {
    "qwen3_moe": qwen3_moe,
    "mixtral": mixtral,
    "qwen3": qwen3,
    "deepseek_v3": deepseek_v3,
}


def write_tiny_model(family: str, directory: Path) -> ModelShape:
    """Write the checkpoint of a family's tiny model, float32, with random weights."""
    randomize_weights(FAMILIES[family]()).save_pretrained(directory)
    return read_shape(directory)


def write_full_config(family: str, directory: Path) -> None:
    """Write config.json of a published model: its sizes, without weights."""
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3Config, Qwen3MoeConfig

    rope = {"rope_type": "default", "rope_theta": 1e6}
    yarn = _YARN | {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32}
    yarn |= {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    makers: dict[str, Callable[[], Any]] = {
        # Qwen3-30B-A3B
        "qwen3_moe": lambda: Qwen3MoeConfig(
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
            intermediate_size=6144,
            norm_topk_prob=True,
            rope_parameters=rope,
        ),
        "mixtral": lambda: MixtralConfig(rope_parameters=rope),  # Mixtral-8x7B
        # Qwen3-8B
        "qwen3": lambda: Qwen3Config(
            hidden_size=4096,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            intermediate_size=12_288,
            rope_parameters=rope,
        ),
        # DeepSeek-V3
        "deepseek_v3": lambda: DeepseekV3Config(
            num_nextn_predict_layers=0, rope_parameters=yarn, n_group=1, topk_group=1
        ),
    }
    architectures = {
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
    }
    config = makers[family]()
    config.eos_token_id = 1
    config.tie_word_embeddings = False
    config.architectures = [architectures[family]]
    config.save_pretrained(directory)
