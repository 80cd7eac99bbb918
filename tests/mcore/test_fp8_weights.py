"""The stream of weights as FP8 engines get it, and what is refused in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.mcore import compat

compat.install()

from megatron_rl.config.schema import EngineSettings
from megatron_rl.mcore.weights.fp8_weights import (
    check_part,
    complete,
    fp8_weights_of,
    quantize_weights,
)
from megatron_rl.models.families import read_shape
from megatron_rl.models.fp8_weights import Fp8Weights
from sglang_bridge.block_fp8 import dequantize
from tests.support.tiny_families import FAMILIES

Named = list[tuple[str, torch.Tensor]]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"
NAMES = Fp8Weights(frozenset({Q_PROJ}), frozenset({NORM}))


def quantize(*tensors: tuple[str, torch.Tensor]) -> Named:
    return list(quantize_weights(iter(tensors), NAMES))


@pytest.fixture
def stream() -> Named:
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 256, generator=rng)
    return quantize((Q_PROJ, weight), (NORM, torch.ones(256)))


def check(stream: Named, dtype: torch.dtype = torch.float32) -> Named:
    return list(complete(iter(stream), NAMES, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_matrix_becomes_scales_and_codes(dtype: torch.dtype) -> None:
    weight = torch.randn(200, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    (scale_name, scales), (name, codes), (norm_name, norm) = quantize(
        (Q_PROJ, weight), (NORM, torch.ones(256, dtype=dtype))
    )
    assert (scale_name, name, norm_name) == (f"{Q_PROJ}_scale_inv", Q_PROJ, NORM)
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, weight.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (2, 2))
    block = weight[128:, :128].float()
    assert scales[1, 0] == block.abs().max() / 448
    golden = (block / scales[1, 0]).to(torch.float8_e4m3fn).float()
    assert torch.equal(codes[128:, :128].float(), golden)
    assert norm.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "mixtral", "deepseek_v3"])
def test_matrices_keep_their_values_within_half_a_step(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A step of e4m3 is an eighth of a power of two. Other tensors pass as they are."""
    FAMILIES[family]().save_pretrained(tmp_path)
    tensors = {k: v.to(dtype) for k, v in load_file(tmp_path / "model.safetensors").items()}
    names = fp8_weights_of(EngineSettings(quantization="fp8"), read_shape(tmp_path))
    assert names is not None
    scales: dict[str, torch.Tensor] = {}
    for name, tensor in quantize_weights(iter(tensors.items()), names):
        if name.endswith("_scale_inv"):
            scales[name.removesuffix("_scale_inv")] = tensor
        elif name in names.matrices:
            weight = tensors[name].float()
            error = (dequantize(tensor, scales[name], torch.float32) - weight).abs()
            smallest_step = scales[name].max() * 2**-9
            assert (error <= 1.001 * (weight.abs() / 16).clamp(min=smallest_step / 2)).all(), name
        else:
            assert tensor is tensors[name]


def test_unquantized_engines_need_no_list(tmp_path: Path) -> None:
    FAMILIES["qwen3"]().save_pretrained(tmp_path)
    shape = read_shape(tmp_path)
    assert fp8_weights_of(EngineSettings(), shape) is None
    settings = EngineSettings(
        quantization="fp8", unquantized_first_layers=1, unquantized_last_layers=2
    )
    names = fp8_weights_of(settings, shape)
    assert names is not None
    assert {name.split(".")[2] for name in names.matrices} == {"1"}


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("model.layers.9.mlp.up_proj.weight", torch.ones(4, 4), "no tensor of this name"),
        (Q_PROJ, torch.ones(4), r"shape is \(4,\)"),
        (Q_PROJ, torch.ones(4, 4, dtype=torch.float8_e4m3fn), "dtype"),
        (Q_PROJ, torch.ones(4, 4, dtype=torch.int8), "dtype"),
        (Q_PROJ, torch.full((4, 4), torch.nan), "NaN"),
    ],
)
def test_weights_that_cannot_be_quantized_are_named(
    name: str, tensor: torch.Tensor, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"weight {name}: .*{reason}"):
        quantize((name, tensor))


def test_a_complete_stream_passes_unchanged(stream: Named) -> None:
    assert [name for name, _ in check(stream)] == [name for name, _ in stream]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_tensor_is_named(stream: Named, missing: int) -> None:
    name, _ = stream.pop(missing)
    with pytest.raises(ValueError, match=rf"weight {Q_PROJ}: its scales|incomplete: {name} did"):
        check(stream)


def test_a_tensor_that_comes_twice_is_named(stream: Named) -> None:
    with pytest.raises(ValueError, match=rf"weight {NORM}: it comes twice"):
        check([*stream, stream[-1]])


def change_tensor(stream: Named, index: int, change: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for position, (name, tensor) in enumerate(stream):
        yield name, change(tensor) if position == index else tensor


@pytest.mark.parametrize("check_stream", [complete, check_part])
@pytest.mark.parametrize(
    ("index", "change", "reason"),
    [
        (0, lambda t: t.bfloat16(), rf"{Q_PROJ}_scale_inv: its dtype is torch.bfloat16"),
        (0, lambda t: t[:1], r"scales must have the shape \(2, 2\), and they have the shape"),
        (1, lambda t: t.float(), rf"{Q_PROJ}: its dtype is torch.float32 instead of .*e4m3fn"),
        (2, lambda t: t.bfloat16(), rf"{NORM}: its dtype is torch.bfloat16"),
    ],
)
def test_other_dtypes_and_shapes_are_named(
    stream: Named, index: int, change: Any, reason: str, check_stream: Any
) -> None:
    with pytest.raises(ValueError, match=reason):
        list(check_stream(change_tensor(stream, index, change), NAMES, torch.float32))


@pytest.mark.parametrize("check_stream", [complete, check_part])
def test_an_unquantized_weight_never_reaches_an_fp8_parameter(check_stream: Any) -> None:
    """SGLang would cast it without a scale, and say nothing."""
    stream = [(Q_PROJ, torch.ones(200, 256)), (NORM, torch.ones(256))]
    with pytest.raises(ValueError, match=rf"{Q_PROJ}: its dtype is torch.float32"):
        list(check_stream(iter(stream), NAMES, torch.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_the_stream_passes_unchanged(dtype: torch.dtype) -> None:
    """An owner sends a part, also in syncs that are not audited."""
    part = quantize((Q_PROJ, torch.ones(200, 256)))
    assert list(check_part(iter(part), NAMES, dtype)) == part
    norm = (NORM, torch.ones(256, dtype=dtype))
    assert list(check_part(iter([norm]), NAMES, dtype)) == [norm]


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        ([(NORM, torch.ones(4))] * 2, rf"weight {NORM}: it comes twice"),
        ([("model.extra", torch.ones(4))], r"weight model\.extra: .* no tensor like it"),
    ],
)
def test_an_owner_refuses_other_names_and_copies(stream: Named, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        list(check_part(iter(stream), NAMES, torch.float32))
