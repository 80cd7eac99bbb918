"""The stage `fp8_product` checks scales and codes as torch's block-wise FP8 product reads them.

No CPU has that product. Here a function with its rules takes its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.lab.gpu_stages import fp8_product as stage
from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped

CPU = torch.device("cpu")
# 6 blocks of inputs, which are padded to 8
SHAPE = (12, 256, 768)
PADDED = "blocks first, padded to 4"
Multiply = Callable[..., torch.Tensor]


def multiply_blocks(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    token_scales: torch.Tensor,
    token_recipe: Any,
    weight_scales: torch.Tensor,
    weight_recipe: Any,
    output_dtype: torch.dtype,
) -> torch.Tensor:
    """Σ_k A[m, k] As[m, k // 128] B[k, n] Bs[k // 128, n // 128], by the rules of torch 2.11.

    A [M, K] by rows, B [K, N] by columns. As [M, L] with strides (1, M), Bs [L4, N / 128] with
    strides (1, L4), where L4 is L = K / 128 rounded up to a multiple of 4.
    """
    M, K = tokens.shape
    N = weight.shape[1]
    assert (token_recipe, weight_recipe) == (
        F.ScalingType.BlockWise1x128,
        F.ScalingType.BlockWise128x128,
    )
    assert tokens.stride() == (K, 1) and weight.stride() == (1, K)
    L4 = -(-K // 128 // 4) * 4
    layouts = [(tuple(s.shape), s.stride()) for s in (token_scales, weight_scales)]
    if layouts != [((M, K // 128), (1, M)), ((L4, N // 128), (1, L4))]:
        raise ValueError(f"scale_b must have shape {L4} x {N // 128}")
    k = torch.arange(K) // 128
    values = tokens.float() * token_scales[:, k]
    weights = weight.float() * weight_scales[k][:, torch.arange(N) // 128]
    return (values @ weights).to(output_dtype)


def report_of(monkeypatch: pytest.MonkeyPatch, multiply: Multiply) -> Report:
    monkeypatch.setattr(F, "scaled_mm", multiply)
    report = Report()
    stage.check_product("small", stage.make_operands(*SHAPE, CPU), report)
    return report


def test_the_first_layout_gives_the_dequantized_product(monkeypatch: pytest.MonkeyPatch) -> None:
    report = report_of(monkeypatch, multiply_blocks)
    assert report.problems == []
    assert report.values["small layout"] == PADDED
    assert report.values["small float32 error_to_dequantized"] < 1e-6
    assert 1e-4 < report.values["small bfloat16 error_to_dequantized"] < 3e-3
    assert not any("with scales" in name for name in report.values)


def test_sizes_are_those_that_the_product_takes() -> None:
    for tokens, outputs, inputs in (SHAPE, *stage.SHAPES.values(), *stage.SMALL_SHAPES.values()):
        assert (tokens % 4, outputs % 128, inputs % 128) == (0, 0, 0)


@pytest.mark.skipif(not hasattr(F, "scaled_mm"), reason="torch has no scaled_mm")
def test_torch_takes_the_first_layout_and_no_other() -> None:
    """Its rules, applied to tensors without data."""
    operands = stage.make_operands(*SHAPE, CPU)
    fields = (getattr(operands, field.name) for field in dataclasses.fields(operands))
    without_data = stage.Operands(*(tensor.to("meta") for tensor in fields))
    outcomes = {}
    for layout, scales in without_data.layouts():
        try:
            outcomes[layout] = without_data.product(scales, torch.bfloat16).shape
        except RuntimeError as error:
            outcomes[layout] = "must have shape" in str(error)
    assert outcomes.pop(PADDED) == (12, 256)
    assert outcomes == {"blocks first": True, "as quantized": True}


def test_other_layouts_are_tried_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*arguments: Any, **options: Any) -> torch.Tensor:
        if arguments[4].shape[0] % 4 == 0:
            raise RuntimeError("padded scales are refused\nwith a second line")
        padded_scales = F.pad(arguments[4].T, (0, 2)).T
        return multiply_blocks(*arguments[:4], padded_scales, arguments[5], **options)

    report = report_of(monkeypatch, multiply)
    assert report.problems == []
    assert report.values["small layout"] == "blocks first"
    refusal = "RuntimeError: padded scales are refused"
    assert report.values[f"small with scales {PADDED}"] == refusal


def with_shifted_scales(place: int) -> Multiply:
    """The product with the scales of other blocks, among the arguments 2 or 4."""

    def multiply(*arguments: Any, **options: Any) -> torch.Tensor:
        changes = list(arguments)
        changes[place] = arguments[place].T.roll(1, 0).contiguous().T
        return multiply_blocks(*changes, **options)

    return multiply


@pytest.mark.parametrize("place", [2, 4])
def test_scales_of_other_blocks_are_an_error(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    report = report_of(monkeypatch, with_shifted_scales(place))
    assert report.problems == ["small has_a_right_layout is false"]
    assert report.values[f"small with scales {PADDED}"] > 0.1


def test_a_refused_output_dtype_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(*arguments: Any, output_dtype: torch.dtype) -> torch.Tensor:
        if output_dtype is torch.float32:
            raise RuntimeError("only bfloat16")
        return multiply_blocks(*arguments, output_dtype=output_dtype)

    report = report_of(monkeypatch, multiply)
    assert report.values["small float32 error_to_dequantized"] == "RuntimeError: only bfloat16"
    assert report.problems == ["small float32 error_to_dequantized is_a_number is false"]


def test_wrong_codes_exceed_the_limit_of_the_quantization() -> None:
    operands = stage.make_operands(*SHAPE, CPU)
    report = Report()
    stage.check_quantization("small", operands, report)
    assert report.problems == []
    assert 0.02 < report.values["small quantization_error"] < stage.MAX_QUANTIZATION_ERROR
    scales = operands.weight_scales.clone()
    scales[scales == scales.max()] *= 2
    report = Report()
    stage.check_quantization("small", dataclasses.replace(operands, weight_scales=scales), report)
    assert len(report.problems) == 1 and "quantization_error" in report.problems[0]


def test_the_small_stage_checks_what_a_cpu_can(tmp_path: Path) -> None:
    report = Report()
    stage.fp8_product(Setting(True, tmp_path), report)
    assert report.problems == []
    assert "small quantization_error" in report.values and "small layout" in report.values


@pytest.mark.parametrize(
    ("capability", "reason"),
    [
        (None, "it needs CUDA"),
        ((8, 9), "compute capability 9.x alone, and this device has 8.9"),
        ((10, 0), "this device has 10.0"),
    ],
)
def test_other_devices_are_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int] | None,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(F, "scaled_mm", multiply_blocks, raising=False)
    with pytest.raises(StageSkipped, match=reason):
        stage.fp8_product(Setting(False, tmp_path), Report())


def test_an_older_torch_is_skipped_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delattr(F, "scaled_mm", raising=False)
    with pytest.raises(StageSkipped, match=r"torch \S+ has no torch\.nn\.functional\.scaled_mm"):
        stage.fp8_product(Setting(False, tmp_path), Report())
