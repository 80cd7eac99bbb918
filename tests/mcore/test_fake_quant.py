"""Weights as a narrower engine would hold them: which tensors are rounded, and to what."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.mcore import compat

compat.install()

from launch.testbed.tiny_families import FAMILIES
from megatron_rl.mcore.weights.fake_quant import fake_quantize, is_linear
from sglang_bridge.weights.expectation import WeightExpectation

NOT_LINEAR = r"embed_tokens|norm|lm_head|\.gate\.|correction_bias"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "mixtral", "deepseek_v3"])
def test_an_fp8_engine_quantises_linear_layers_and_nothing_else(family: str, tmp_path: Any) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    linear = {name for name in tensors if is_linear(name)}
    assert linear == {name for name in tensors if not re.search(NOT_LINEAR, name)}
    assert linear and all(tensors[name].ndim == 2 for name in linear)


def test_fp8_keeps_each_number_within_half_a_step_of_its_block_s_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator)
    weight[:128, :128] *= 50
    name = "model.layers.3.mlp.experts.7.gate_proj.weight"
    ((_, found),) = fake_quantize(iter([(name, weight)]), "fp8_blockwise")
    assert found.shape == weight.shape and found.dtype == weight.dtype
    for rows in (slice(0, 128), slice(128, None)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, None)):
            block, back = weight[rows, columns], found[rows, columns]
            scale = float(block.abs().max()) / 448
            assert (
                (block - back).abs() <= (block.abs() / 16).clamp(min=scale * 2**-10) * 1.001
            ).all()
            in_steps = (back / scale).to(torch.float8_e4m3fn).float() * scale
            torch.testing.assert_close(in_steps, back, rtol=1e-6, atol=0)
    assert 0.01 < float((found - weight).norm() / weight.norm()) < 0.04


def test_bfloat16_rounds_every_tensor_but_what_engines_keep() -> None:
    tensors = {
        "model.embed_tokens.weight": torch.tensor([[1.001, 2.003]]),
        "model.layers.0.mlp.gate.weight": torch.tensor([[0.1, 0.2]]),
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.tensor([0.1]),
    }
    found = dict(fake_quantize(iter(tensors.items()), "bf16"))
    for name in list(tensors)[:2]:
        assert torch.equal(found[name], tensors[name].bfloat16().float()) and not torch.equal(
            found[name], tensors[name]
        )
    assert torch.equal(found[list(tensors)[2]], tensors[list(tensors)[2]])


def test_off_sends_the_very_same_tensors() -> None:
    tensors = [("model.layers.0.self_attn.q_proj.weight", torch.ones(2, 2))]
    ((_, found),) = fake_quantize(iter(tensors), "off")
    assert found is tensors[0][1]


def test_the_audit_expects_the_rounded_values() -> None:
    """What is sent passes the expectation's record on its way: the two cannot differ."""
    weight, name = (
        torch.randn(4, 4, generator=torch.Generator().manual_seed(1)),
        "model.layers.0.self_attn.o_proj.weight",
    )

    def expected(simulation: Any) -> tuple[dict[str, str], torch.Tensor]:
        expectation = WeightExpectation(dtype=torch.float32, num_experts=8)
        ((_, sent),) = expectation.observe(fake_quantize(iter([(name, weight)]), simulation))
        return expectation.checksums(), sent

    (rounded_sums, sent), (exact_sums, _) = expected("fp8_blockwise"), expected("off")
    again = WeightExpectation(dtype=torch.float32, num_experts=8)
    again.add(name, sent)
    assert rounded_sums == again.checksums() != exact_sums
