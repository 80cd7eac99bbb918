"""Simulated rounding of weights: which tensors are rounded, and to which values."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.mcore.weights.fake_quant import fake_quantize, is_linear
from sglang_bridge.weights.expectation import WeightExpectation
from tests.support.tiny_families import FAMILIES

NOT_LINEAR = r"embed_tokens|norm|lm_head|\.gate\.|correction_bias"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "mixtral", "deepseek_v3"])
def test_fp8_rounds_linear_layers_and_nothing_else(family: str, tmp_path: Any) -> None:
    FAMILIES[family]().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    linear = {name for name in tensors if is_linear(name)}
    assert linear == {name for name in tensors if not re.search(NOT_LINEAR, name)}
    assert linear and all(tensors[name].ndim == 2 for name in linear)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"])
def test_fp8_leaves_other_matrices_as_they_are(name: str) -> None:
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    ((_, result),) = fake_quantize(iter([(name, weight)]), "fp8_blockwise")
    assert result is weight


def test_fp8_rounds_to_e4m3_multiples_of_the_block_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 300, generator=generator)
    weight[:128, :128] *= 50
    name = "model.layers.3.mlp.experts.7.gate_proj.weight"
    ((_, result),) = fake_quantize(iter([(name, weight)]), "fp8_blockwise")
    assert result.shape == weight.shape and result.dtype == weight.dtype
    for rows in (slice(0, 128), slice(128, None)):
        for columns in (slice(0, 128), slice(128, 256), slice(256, None)):
            check_fp8_block(weight[rows, columns], result[rows, columns])
    assert 0.01 < float((result - weight).norm() / weight.norm()) < 0.04


def check_fp8_block(block: torch.Tensor, result: torch.Tensor) -> None:
    """Check that each value is within half a step of e4m3 and a multiple of the block's scale."""
    scale = float(block.abs().max()) / 448
    half_step = (block.abs() / 16).clamp(min=scale * 2**-10)
    assert ((block - result).abs() <= half_step * 1.001).all()
    fp8 = (result / scale).to(torch.float8_e4m3fn)
    torch.testing.assert_close(fp8.float() * scale, result, rtol=1e-6, atol=0)


def test_bfloat16_rounds_every_tensor_except_expert_biases() -> None:
    tensors = {
        "model.embed_tokens.weight": torch.tensor([[1.001, 2.003]]),
        "model.layers.0.mlp.gate.weight": torch.tensor([[0.1, 0.2]]),
        "model.layers.0.mlp.gate.e_score_correction_bias": torch.tensor([0.1]),
    }
    results = dict(fake_quantize(iter(tensors.items()), "bf16"))
    *weights, bias = tensors
    for name in weights:
        assert torch.equal(results[name], tensors[name].bfloat16().float())
        assert not torch.equal(results[name], tensors[name])
    assert torch.equal(results[bias], tensors[bias])


def test_off_yields_the_same_tensors() -> None:
    tensors = [("model.layers.0.self_attn.q_proj.weight", torch.ones(2, 2))]
    ((_, result),) = fake_quantize(iter(tensors), "off")
    assert result is tensors[0][1]


def test_audit_expects_the_rounded_values() -> None:
    """The expectation observes the tensors on their way to the engine."""
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    name = "model.layers.0.self_attn.o_proj.weight"

    def observe(mode: Any) -> tuple[dict[str, str], torch.Tensor]:
        expectation = WeightExpectation(dtype=torch.float32, num_experts=8)
        ((_, tensor),) = expectation.observe(fake_quantize(iter([(name, weight)]), mode))
        return expectation.checksums(), tensor

    fp8_checksums, fp8_tensor = observe("fp8_blockwise")
    exact_checksums, _ = observe("off")
    engine = WeightExpectation(dtype=torch.float32, num_experts=8)
    engine.add(name, fp8_tensor)
    assert fp8_checksums == engine.checksums() != exact_checksums
