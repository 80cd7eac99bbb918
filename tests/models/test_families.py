"""Each family reads its config.json and refuses unsupported settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.models.families import FAMILIES, parameter_names, read_shape
from megatron_rl.models.shape import LatentAttention, ModelConfigError, Router

_COMMON: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 48,
    "eos_token_id": 1,
}
QWEN3 = _COMMON | {"architectures": ["Qwen3ForCausalLM"]}
QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
MIXTRAL = _COMMON | {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}


def write(directory: Path, raw: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_qwen3_has_no_experts(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, QWEN3))
    assert (shape.moe_layers, shape.num_experts, shape.topk) == ((), 0, 0)
    assert (shape.qk_norm, shape.head_dim) == (True, 128)


def test_mixtral_has_experts_in_every_layer_and_no_query_norms(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, MIXTRAL))
    assert (shape.moe_layers, shape.moe_ffn_hidden_size, shape.qk_norm) == ((0, 1, 2, 3), 96, False)
    assert (shape.router, shape.rope_theta, shape.rms_norm_eps) == (
        Router(normalizes_weights=True),
        1e6,
        1e-5,
    )
    assert parameter_names(shape)["mlp.experts.linear_fc1.weight"][0] == tuple(
        f"block_sparse_moe.experts.{{expert}}.{name}.weight" for name in ("w1", "w3")
    )


def test_deepseek_has_latent_attention_and_a_router_with_groups(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, DEEPSEEK))
    assert shape.latent == LatentAttention(20, 24, 12, 8, 10)
    assert (shape.moe_layers, shape.num_experts, shape.shared_ffn_hidden_size) == (
        (1, 2, 3),
        16,
        64,
    )
    assert shape.router == Router(
        "sigmoid", normalizes_weights=True, scaling=2.5, groups=4, group_topk=2, bias=True
    )
    assert (shape.head_dim, shape.num_key_value_heads) == (20, 4)


def test_router_without_a_group_limit_has_no_groups(tmp_path: Path) -> None:
    shape = read_shape(write(tmp_path, DEEPSEEK | {"topk_group": 4, "q_lora_rank": None}))
    assert (shape.router.groups, shape.router.group_topk) == (1, 1)
    assert shape.latent is not None and shape.latent.q_rank is None


@pytest.mark.parametrize("raw", [QWEN3, MIXTRAL, DEEPSEEK], ids=lambda raw: raw["architectures"][0])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope type 'llama3'"),
        ({"rope_theta": 12345.6}, "rope_theta=12345.6 .*whole"),
        ({"rope_parameters": {"rope_theta": 12345.6}}, "rope_theta=12345.6 .*whole"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 .*every"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 .*every"),
        ({"attention_bias": True}, "attention_bias=true"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "use the bf16 checkpoint"),
        ({"eos_token_id": None}, "eos_token_id is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
    ],
)
def test_settings_that_no_family_supports_are_refused(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=rf"config\.json: .*{message}"):
        read_shape(write(tmp_path, raw | changes))


@pytest.mark.parametrize(
    ("raw", "changes", "message"),
    [
        (QWEN3, {"use_sliding_window": True}, "use_sliding_window=true"),
        (MIXTRAL, {"sliding_window": 4096}, "sliding_window=4096"),
        (MIXTRAL, {"router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        (MIXTRAL, {"head_dim": 32}, "head_dim=32"),
        (MIXTRAL, {"num_experts_per_tok": 9}, "exceeds num_local_experts=8"),
        (MIXTRAL, {"num_experts_per_tok": 1}, "num_experts_per_tok=1 .*router"),
        (QWEN3_MOE, {"num_experts_per_tok": 1, "norm_topk_prob": True}, "norm_topk_prob=true"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads=2"),
        (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
        (DEEPSEEK, {"topk_method": "greedy"}, "topk_method='greedy'"),
        (DEEPSEEK, {"norm_topk_prob": False}, "norm_topk_prob=false"),
        (DEEPSEEK, {"num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        (DEEPSEEK, {"num_experts_per_tok": 17}, "exceeds n_routed_experts=16"),
        (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        (DEEPSEEK, {"rope_interleave": False}, "rope_interleave=false"),
        (DEEPSEEK, {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers=1.*set it to 0"),
        (DEEPSEEK, {"first_k_dense_replace": 4}, "first_k_dense_replace=4: no layer has experts"),
        (DEEPSEEK, {"n_group": 3}, "n_group=3"),
        (DEEPSEEK, {"topk_group": 5}, "n_group=4.*5 of them are selected"),
        (DEEPSEEK, {"topk_group": 1}, "topk_group=1 is not supported.*best 4"),
    ],
)
def test_settings_that_a_family_does_not_support_are_refused(
    tmp_path: Path, raw: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=rf"config\.json: .*{message}"):
        read_shape(write(tmp_path, raw | changes))


def test_one_expert_for_each_token_without_normalized_weights(tmp_path: Path) -> None:
    assert read_shape(write(tmp_path, QWEN3_MOE | {"num_experts_per_tok": 1})).topk == 1


def test_whole_rotary_settings_are_accepted(tmp_path: Path) -> None:
    rope = {"rope_theta": 12345.0, "partial_rotary_factor": 1.0}
    assert read_shape(write(tmp_path, QWEN3 | {"rope_parameters": rope})).rope_theta == 12345


def test_families_are_listed_by_architecture() -> None:
    assert [*FAMILIES] == [
        "Qwen3MoeForCausalLM",
        "Qwen3ForCausalLM",
        "MixtralForCausalLM",
        "DeepseekV3ForCausalLM",
    ]
