"""The names of quantized tensors, and the parts of a model that blocks do not divide."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_rl.models.families import read_shape
from megatron_rl.models.fp8_weights import fp8_weights, quantization_config, undivided_parts
from megatron_rl.models.shape import ModelShape
from tests.support.tiny_families import FAMILIES

NOT_LINEAR = re.compile(r"embed_tokens|norm|lm_head|\.gate\.|correction_bias")
QWEN3_30B_A3B = ModelShape(
    architecture="Qwen3MoeForCausalLM",
    num_layers=48,
    hidden_size=2048,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    qk_norm=True,
    ffn_hidden_size=6144,
    vocab_size=151936,
    rope_theta=1e6,
    rms_norm_eps=1e-6,
    initializer_range=0.02,
    tie_word_embeddings=False,
    max_position_embeddings=40960,
    eos_token_ids=(151645,),
    moe_layers=tuple(range(48)),
    num_experts=128,
    topk=8,
    moe_ffn_hidden_size=768,
)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "mixtral", "deepseek_v3"])
def test_every_tensor_of_a_family_is_in_one_list(family: str, tmp_path: Path) -> None:
    """transformers writes exactly these names."""
    FAMILIES[family]().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = fp8_weights(read_shape(tmp_path))
    assert names.matrices | names.others == set(tensors)
    assert not names.matrices & names.others
    assert names.others == {name for name in tensors if NOT_LINEAR.search(name)}
    assert all(tensors[name].ndim == 2 for name in names.matrices)


def test_full_rank_queries_have_other_names(tmp_path: Path) -> None:
    FAMILIES["deepseek_v3"](q_rank=None).save_pretrained(tmp_path)
    names = fp8_weights(read_shape(tmp_path))
    assert names.matrices | names.others == set(load_file(tmp_path / "model.safetensors"))


def test_the_number_of_quantized_tensors_of_a_published_model() -> None:
    assert len(fp8_weights(QWEN3_30B_A3B).matrices) == 48 * (4 + 128 * 3)


def test_the_first_and_last_layers_can_stay_unquantized() -> None:
    names = fp8_weights(QWEN3_30B_A3B, unquantized_first=2, unquantized_last=1)
    layers = {int(name.split(".")[2]) for name in names.matrices}
    assert layers == set(range(2, 47))
    assert "model.layers.0.mlp.experts.127.down_proj.weight" in names.others
    modules = quantization_config(QWEN3_30B_A3B, unquantized_first=2, unquantized_last=1)
    skipped_layers = [m for m in modules["modules_to_not_convert"] if m.count(".") == 2]
    assert skipped_layers == ["model.layers.0", "model.layers.1", "model.layers.47"]


def test_routers_and_the_output_layer_are_never_quantized() -> None:
    config = quantization_config(QWEN3_30B_A3B)
    assert config["weight_block_size"] == [128, 128]
    assert config["modules_to_not_convert"] == [
        "lm_head",
        *(f"model.layers.{layer}.mlp.gate" for layer in range(48)),
    ]


@pytest.mark.parametrize(
    ("tp", "ep", "parts"),
    [
        (1, 1, []),
        (4, 1, [("moe_intermediate_size", 192)]),
        (4, 4, []),
        (8, 8, []),
    ],
)
def test_blocks_that_tensor_parallelism_cuts(
    tp: int, ep: int, parts: list[tuple[str, int]]
) -> None:
    assert list(undivided_parts(QWEN3_30B_A3B, tp=tp, ep=ep)) == parts


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"hidden_size": 96}, ("hidden_size", 96)),
        ({"num_attention_heads": 1, "head_dim": 64}, ("heads x head_dim", 64)),
        ({"num_key_value_heads": 1, "head_dim": 96}, ("key-value heads x head_dim", 96)),
        ({"moe_layers": (0, 1), "ffn_hidden_size": 200}, ("intermediate_size", 200)),
    ],
)
def test_each_part_that_blocks_do_not_divide_is_named(
    change: dict[str, int], part: tuple[str, int]
) -> None:
    shape = dataclasses.replace(QWEN3_30B_A3B, **change)  # type: ignore[arg-type]
    assert part in list(undivided_parts(shape, tp=1, ep=1))
