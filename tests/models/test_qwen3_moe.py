"""Qwen3-MoE: config.json of transformers 4 and 5, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.models.families import read_shape
from megatron_rl.models.shape import ModelConfigError

RAW: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 48,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "eos_token_id": [1, 2],
}


def write(directory: Path, changes: dict[str, Any], remove: tuple[str, ...] = ()) -> Path:
    raw = {key: value for key, value in (RAW | changes).items() if key not in remove}
    (directory / "config.json").write_text(json.dumps(raw))
    return directory


def test_configs_of_transformers_4_and_5_are_equal(tmp_path: Path) -> None:
    old = read_shape(write(tmp_path, {}))
    transformers_5 = {
        "num_local_experts": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    assert read_shape(write(tmp_path, transformers_5, remove=("num_experts", "rope_theta"))) == old
    assert (old.num_experts, old.rope_theta, old.eos_token_ids) == (8, 1e6, (1, 2))


def test_moe_layers_follow_step_and_exceptions(tmp_path: Path) -> None:
    settings = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert read_shape(write(tmp_path, settings)).moe_layers == (1, 5)


def test_null_is_the_same_as_a_missing_key(tmp_path: Path) -> None:
    keys = ("head_dim", "rope_scaling", "quantization_config", "max_position_embeddings")
    with_nulls = read_shape(write(tmp_path, dict.fromkeys(keys)))
    assert with_nulls == read_shape(write(tmp_path, {}, remove=("head_dim",)))
    assert read_shape(write(tmp_path, {"num_key_value_heads": None})).num_key_value_heads == 4


@pytest.mark.parametrize(
    ("changes", "remove", "message"),
    [
        ({}, ("num_experts",), "num_experts is missing"),
        (
            {"architectures": ["GptOssForCausalLM"]},
            (),
            "GptOssForCausalLM.*one of Qwen3MoeForCausalLM, Qwen3",
        ),
        ({"use_sliding_window": True}, (), "use_sliding_window=true"),
        (
            {"mlp_only_layers": [0, 1, 2, 3, 4, 5]},
            (),
            r"mlp_only_layers=\[0, 1, 2, 3, 4, 5\] and decoder_sparse_step=1: no layer has "
            "experts; choose another checkpoint",
        ),
        (
            {"decoder_sparse_step": 7},
            (),
            r"mlp_only_layers=\[\] and decoder_sparse_step=7: no layer",
        ),
        ({"num_experts_per_tok": 9}, (), "num_experts_per_tok=9"),
        ({"num_key_value_heads": 3}, (), "num_key_value_heads=3"),
        ({"hidden_size": "64"}, (), "hidden_size='64'"),
        ({"num_hidden_layers": 0}, (), "num_hidden_layers=0"),
        ({"attention_bias": True}, (), "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn"}}, (), "yarn"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            (),
            r"quantization_config=\{'quant_method': 'fp8'\} .*bf16",
        ),
        ({}, ("eos_token_id",), "eos_token_id"),
        ({}, ("vocab_size",), "vocab_size is missing"),
    ],
)
def test_unsupported_models_are_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], remove: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read_shape(write(tmp_path, changes, remove))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": 5}, "architectures=5: expected `array`"),
        ({"rope_parameters": 5}, "rope_parameters=5: expected `object"),
        ({"rope_parameters": [1]}, r"rope_parameters=\[1\]: expected `object"),
        (
            {"rope_parameters": {"rope_theta": "1e6"}},
            r"rope_parameters\.rope_theta='1e6': expected `float",
        ),
        ({"rope_theta": float("nan")}, "rope_theta=nan: expected `float` >= 1"),
        ({"rms_norm_eps": float("inf")}, r"rms_norm_eps=inf: expected `float` <= 1e\+30"),
        ({"eos_token_id": "x"}, "eos_token_id='x': expected `int"),
        ({"eos_token_id": []}, r"eos_token_id=\[\]: expected `array` of length >= 1"),
        ({"eos_token_id": [1, True]}, r"eos_token_id=\[1, True\]: expected `int`"),
        ({"eos_token_id": -1}, "eos_token_id=-1: expected `int` >= 0"),
        ({"mlp_only_layers": 5}, "mlp_only_layers=5: expected `array`"),
        ({"mlp_only_layers": [0, 99]}, r"mlp_only_layers=\[0, 99\]: expected layers from 0 to 5"),
        ({"mlp_only_layers": ["a"]}, r"mlp_only_layers=\['a'\]: expected `int`"),
        ({"hidden_size": 2.5}, "hidden_size=2.5: expected `int`"),
        ({"num_hidden_layers": True}, "num_hidden_layers=true: expected `int`"),
        ({"num_experts": 10**400}, r"num_experts=1000.*: expected `int"),
        ({"norm_topk_prob": "no"}, "norm_topk_prob='no': expected `bool`"),
    ],
)
def test_invalid_values_are_named_with_rule_and_file(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        ModelConfigError, match=rf"config\.json: {message}.*; correct it, or take"
    ) as error:
        read_shape(write(tmp_path, changes))
    assert error.value.exit_code is ExitCode.BAD_DATA


@pytest.mark.parametrize("content", [None, "{", "[1]", "[" * 100_000])
def test_missing_or_invalid_file_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        read_shape(tmp_path)
