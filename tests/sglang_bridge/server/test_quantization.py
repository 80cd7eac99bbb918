"""An external server must quantize its model as the trainer expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError
from sglang_bridge.server.quantization import format_override, require_quantization

ENGINE = Engine(url="http://127.0.0.1:3")
FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.1.mlp.gate", "model.layers.0"],
}


def checkpoint_info(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """`/server_info` of a server whose checkpoint has this quantization_config."""
    config = {key: value for key, value in (FP8 | changes).items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return {"model_path": str(tmp_path), "quantization": None, "json_model_override_args": "{}"}


def started_with(config: dict[str, Any]) -> dict[str, Any]:
    """`/server_info` of a server whose command line has this quantization_config."""
    override = format_override(config)
    return {"model_path": "on/another/machine", "json_model_override_args": override}


def test_unquantized_servers_are_accepted(tmp_path: Path) -> None:
    require_quantization(ENGINE, {"model_path": "on/another/machine"}, None)
    for harmless in ("{}", "not json", "[]"):
        (tmp_path / "config.json").write_text(harmless)
        require_quantization(ENGINE, {"model_path": str(tmp_path), "quantization": None}, None)


def test_quantized_servers_are_refused_by_an_unquantized_run(tmp_path: Path) -> None:
    answers = {
        "runs with quantization=fp8": {"quantization": "fp8"},
        "runs with a quantization_config in --json-model-override-args": started_with(FP8),
        f"serves the quantized checkpoint {tmp_path}": checkpoint_info(tmp_path),
    }
    for reason, info in answers.items():
        with pytest.raises(EngineError, match=r"engine\.quantization=null.*use engine\.quant") as e:
            require_quantization(ENGINE, info, None)
        assert f"http://127.0.0.1:3 {reason}, and weights would be sent" in str(e.value)


def test_servers_with_the_same_quantization_are_accepted(tmp_path: Path) -> None:
    require_quantization(ENGINE, checkpoint_info(tmp_path), FP8)
    require_quantization(ENGINE, started_with(FP8), FP8)
    # As published checkpoints list them: other names for the same, and modules that stay anyway
    same = ["model.embed_tokens", "layers.0", "model.layers.1.input_layernorm", "lm_head"]
    require_quantization(ENGINE, checkpoint_info(tmp_path, modules_to_not_convert=same), FP8)
    exclusions = {"ignored_layers": ["layers.0"], "modules_to_not_convert": ["model.layers.7"]}
    require_quantization(ENGINE, checkpoint_info(tmp_path, **exclusions), FP8)


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\] instead of \[128, 128\]"),
        ({"weight_block_size": None}, "weight_block_size=None"),
        ({"quant_method": "modelopt"}, "quant_method='modelopt' instead of 'fp8'"),
        ({"activation_scheme": "static"}, "activation_scheme='static'"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt='ue8m0' instead of float32 scales"),
        ({"modules_to_not_convert": ["lm_head"]}, r"modules \[\] instead of \[layers.0\]"),
        (
            {"modules_to_not_convert": ["layers.0", "layers.3.self_attn.q_proj"]},
            r"\[layers.0, layers.3.self_attn.q_proj\] instead of \[layers.0\]",
        ),
    ],
)
def test_other_quantizations_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], difference: str
) -> None:
    with pytest.raises(EngineError, match=difference) as error:
        require_quantization(ENGINE, checkpoint_info(tmp_path, **changes), FP8)
    assert "engine.quantization=fp8: http://127.0.0.1:3 quantizes with" in str(error.value)
    assert f"--json-model-override-args '{format_override(FP8)}'" in str(error.value)


def test_unquantized_servers_are_refused_by_a_quantized_run() -> None:
    with pytest.raises(EngineError, match="quantization_config=None; start it with"):
        require_quantization(ENGINE, {"model_path": "on/another/machine"}, FP8)
    with pytest.raises(EngineError, match="quantization=awq"):
        require_quantization(ENGINE, started_with(FP8) | {"quantization": "awq"}, FP8)


def test_the_command_line_comes_before_the_checkpoint(tmp_path: Path) -> None:
    info = checkpoint_info(tmp_path, weight_block_size=[64, 64])
    info["json_model_override_args"] = format_override(FP8)
    require_quantization(ENGINE, info, FP8)


def test_other_overrides_are_refused() -> None:
    info = {"json_model_override_args": '{"rope_theta": 5, "num_experts_per_tok": 1}'}
    with pytest.raises(EngineError, match="changes num_experts_per_tok, rope_theta"):
        require_quantization(ENGINE, info, None)
    with pytest.raises(EngineError, match="no JSON object"):
        require_quantization(ENGINE, {"json_model_override_args": "[1"}, None)
