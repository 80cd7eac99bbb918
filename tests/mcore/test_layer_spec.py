"""Choice of a model's modules. Transformer Engine's modules are chosen here, but never built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.models.families import read_shape
from tests.mcore.test_hf_weights import build
from tests.support.tiny_families import FAMILIES


@pytest.mark.parametrize(
    ("has_cuda", "has_te", "settings", "spec"),
    [
        (True, True, {"dtype": "bfloat16"}, "te"),
        (True, True, {"dtype": "float32"}, "local"),
        (True, False, {"dtype": "bfloat16"}, "local"),
        (False, True, {"dtype": "bfloat16"}, "local"),
        (True, True, {"dtype": "bfloat16", "spec": "local"}, "local"),
        (False, False, {"dtype": "bfloat16", "spec": "te"}, "te"),
    ],
)
def test_null_spec_is_transformer_engine_where_it_runs(
    megatron: Any,
    monkeypatch: pytest.MonkeyPatch,
    has_cuda: bool,
    has_te: bool,
    settings: Any,
    spec: str,
) -> None:
    from megatron_rl.mcore import layer_spec

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(layer_spec, "has_transformer_engine", lambda: has_te)
    assert layer_spec.resolve_spec(ModelSettings(path="x", **settings)) == spec


def test_only_transformer_engine_has_grouped_experts_and_fp8(megatron: Any) -> None:
    from megatron_rl.mcore.layer_spec import spec_options
    from megatron_rl.mcore.model import pack_multiple

    def te(fp8: Any) -> ModelSettings:
        return ModelSettings(path="x", dtype="bfloat16", spec="te", fp8=fp8)

    assert spec_options(ModelSettings(path="x", spec="local")) == {"moe_grouped_gemm": False}
    assert spec_options(te(None)) == {"moe_grouped_gemm": True}
    for recipe, encoding, rows in (
        ("tensorwise", "hybrid", 16),
        ("blockwise", "e4m3", 128),
        ("mxfp8", "e4m3", 32),
    ):
        assert spec_options(te(recipe)) == {
            "moe_grouped_gemm": True,
            "fp8": encoding,
            "fp8_recipe": recipe,
        }
        assert pack_multiple(te(recipe)) == rows
    assert pack_multiple(te(None)) == 1


def test_local_model_has_no_fused_module(megatron: Any, checkpoint: Path) -> None:
    (model,), _ = build(checkpoint, spec="local")
    kinds = {type(module).__name__ for module in model.modules()}
    assert {"PackedAttention", "RmsNorm", "SequentialMLP"} <= kinds
    assert not [
        kind for kind in kinds if kind.startswith("TE") or "Fused" in kind or "Grouped" in kind
    ]
    assert not [
        key for key, value in vars(model.config).items() if key.endswith("_fusion") and value
    ]
    assert not model.config.persist_layer_norm


@pytest.mark.parametrize(
    ("family", "expected_norms"),
    [
        ("qwen3_moe", {"self_attention.linear_qkv.layer_norm_weight"}),
        (
            "deepseek_v3",
            {
                "input_layernorm.weight",
                *(f"self_attention.linear_{x}_up_proj.layer_norm_weight" for x in ("q", "kv")),
            },
        ),
    ],
)
def test_checkpoints_use_the_norm_names_of_transformer_engine(
    megatron: Any, tmp_path: Path, family: str, expected_norms: set[str]
) -> None:
    """Transformer Engine fuses each norm into the layer behind it, except before experts."""
    from megatron_rl.mcore.model import build_models

    FAMILIES[family]().save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    with torch.device("meta"):
        (model,) = build_models(
            shape, ModelSettings(path=str(tmp_path)), ParallelSettings(), on_gpu=False
        )
    names = {value.key for value in model.sharded_state_dict().values() if hasattr(value, "key")}
    for layer in range(shape.num_layers):
        start = f"decoder.layers.{layer}."
        norms = {
            name.removeprefix(start) for name in names if name.startswith(start) and "norm" in name
        }
        qk_norms = {f"self_attention.{x}_layernorm.weight" for x in "qk"}
        last_norm = (
            "pre_mlp_layernorm.weight"
            if layer in shape.moe_layers
            else "mlp.linear_fc1.layer_norm_weight"
        )
        assert norms - qk_norms == expected_norms | {last_norm}
