"""NVIDIA ModelOpt's `FP8QTensor` gives the same codes and scales as `quantize_fp8_blockwise`.

ModelOpt's exporter of block FP8 keeps scales in float32 and divides the weights by them
(`export/quant_utils.py`: `get_scaling_factor`, `to_quantized_weight`). So do we.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from espo_kernels import quantize_fp8_blockwise

pytestmark = pytest.mark.filterwarnings("ignore")

BLOCKS = {-1: 128, -2: 128}
QWEN3_30B_A3B = {
    "q_proj": (4096, 2048),
    "k_proj": (512, 2048),
    "o_proj": (2048, 4096),
    "experts.gate_proj": (768, 2048),
    "experts.down_proj": (2048, 768),
}
DEEPSEEK_V3 = {
    "q_a_proj": (1536, 7168),
    "kv_a_proj_with_mqa": (576, 7168),
    "kv_b_proj": (32768, 512),
    "experts.gate_proj": (2048, 7168),
    "experts.down_proj": (7168, 2048),
}
# More than 100 MB each in float32
LARGE = {
    "q_b_proj": (24576, 1536),
    "o_proj": (7168, 16384),
    "mlp.gate_proj": (18432, 7168),
    "mlp.down_proj": (7168, 18432),
}
# test_scales_from_float32_weights_need_no_help has float32 weights every day
DTYPES = [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def modelopt() -> Any:
    return pytest.importorskip("modelopt.torch.quantization.qtensor.fp8_tensor", exc_type=Exception)


def weight_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Random weights at the size of trained ones, with a few columns that are much larger."""
    rng = torch.Generator().manual_seed(shape[0] + shape[1])
    weight = torch.randn(shape, generator=rng) * 0.02
    weight[:, ::97] *= 30
    return weight.to(dtype)


def codes_of(tensor: Any) -> torch.Tensor:
    """Return the codes of a tensor of ModelOpt, uint8."""
    from modelopt.torch.quantization.qtensor import QTensorWrapper

    return QTensorWrapper(tensor).data.view(torch.uint8)


def assert_same_bits(modelopt: Any, weight: torch.Tensor) -> None:
    fp8, scale_inv = quantize_fp8_blockwise(weight)
    amax = modelopt.reduce_block_amax(modelopt.reduce_block_padding(weight, BLOCKS), BLOCKS)
    theirs, their_scales = modelopt.FP8QTensor.quantize(
        weight, scales=amax.float() / 448.0, block_sizes=BLOCKS
    )
    assert scale_inv.dtype == their_scales.dtype == torch.float32
    assert torch.equal(scale_inv, their_scales)
    assert torch.equal(fp8.view(torch.uint8), codes_of(theirs))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", QWEN3_30B_A3B)
def test_same_bits_as_modelopt_on_shapes_of_qwen3_30b_a3b(
    modelopt: Any, name: str, dtype: torch.dtype
) -> None:
    assert_same_bits(modelopt, weight_of(QWEN3_30B_A3B[name], dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", DEEPSEEK_V3)
def test_same_bits_as_modelopt_on_shapes_of_deepseek_v3(
    modelopt: Any, name: str, dtype: torch.dtype
) -> None:
    assert_same_bits(modelopt, weight_of(DEEPSEEK_V3[name], dtype))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LARGE)
def test_same_bits_as_modelopt_on_the_large_shapes_of_deepseek_v3(
    modelopt: Any, name: str, dtype: torch.dtype
) -> None:
    assert_same_bits(modelopt, weight_of(LARGE[name], dtype))


@pytest.mark.slow
def test_scales_from_float32_weights_need_no_help(modelopt: Any) -> None:
    """In float32, ModelOpt computes the same scales by itself."""
    weight = weight_of((300, 500), torch.float32)
    fp8, scale_inv = quantize_fp8_blockwise(weight)
    theirs, their_scales = modelopt.FP8QTensor.quantize(weight, block_sizes=BLOCKS)
    assert torch.equal(scale_inv, their_scales)
    assert torch.equal(fp8.view(torch.uint8), codes_of(theirs))


@pytest.mark.slow
def test_a_product_with_the_reciprocal_gives_other_codes() -> None:
    """The oracle tells both apart: a multiplication rounds twice, and some codes differ."""
    weight = weight_of((4096, 2048), torch.bfloat16)
    fp8, scale_inv = quantize_fp8_blockwise(weight)
    scales = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    products = (weight.float() * scales.reciprocal()).to(torch.float8_e4m3fn)
    differences = (products.view(torch.uint8) != fp8.view(torch.uint8)).float().mean()
    assert 1e-5 < differences < 1e-3


@pytest.mark.slow
def test_modelopt_reads_our_codes_and_scales(modelopt: Any) -> None:
    weight = torch.randn(256, 384, dtype=torch.bfloat16)
    fp8, scale_inv = quantize_fp8_blockwise(weight)
    values = modelopt.FP8QTensor(weight.shape, torch.float32, fp8).dequantize(
        torch.float32, scale=scale_inv, block_sizes=BLOCKS
    )
    scales = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(values, fp8.float() * scales)
