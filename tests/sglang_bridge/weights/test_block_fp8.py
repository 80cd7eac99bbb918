"""Checksums of FP8 parameters: of their bfloat16 values, and on CPUs of codes and scales too."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_bridge.block_fp8 import dequantize
from sglang_bridge.weights.expectation import WeightExpectation

ATTENTION = "model.layers.0.self_attn"
EXPERTS = "model.layers.0.mlp.experts"
QKV = [f"{ATTENTION}.{x}_proj.weight" for x in "qkv"]


def sha(*tensors: torch.Tensor) -> str:
    data = b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()[:16]


def pair(seed: int, rows: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    codes = torch.randn(rows, 256, generator=rng).to(torch.float8_e4m3fn)
    return codes, torch.rand(rows // 128, 2, generator=rng) + 0.5


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bfloat16 values by another way: block by block."""
    blocks = codes.float().unfold(0, 128, 128).unfold(1, 128, 128) * scales[..., None, None]
    return blocks.permute(0, 2, 1, 3).reshape(codes.shape).bfloat16()


def expectation(device: str = "cpu", *, compares_values: bool = True) -> WeightExpectation:
    return WeightExpectation(
        dtype=torch.float32,
        num_experts=2,
        device=device,  # type: ignore[arg-type]
        compares_values=compares_values,
    )


def test_values_of_codes_and_scales() -> None:
    codes, scales = pair(0)
    codes[3, 200] = 448.0
    result = dequantize(codes, scales, torch.float32)
    assert result[3, 200] == 448.0 * scales[0, 1]
    assert torch.equal(dequantize(codes, scales, torch.bfloat16), values(codes, scales))


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)))
def test_checksums_of_a_fused_parameter_in_any_order(order: list[int]) -> None:
    pairs = {name: pair(seed) for seed, name in enumerate(QKV)}
    stream = [(name, codes) for name, (codes, _) in pairs.items()]
    stream += [(f"{name}_scale_inv", scales) for name, (_, scales) in pairs.items()]
    record = expectation()
    for index in order:
        record.add(*stream[index])
    weight = f"{ATTENTION}.qkv_proj.weight"
    assert record.checksums() == {
        weight: sha(*(values(*p) for p in pairs.values())),
        f"{weight}:codes": sha(*(codes for codes, _ in pairs.values())),
        f"{weight}_scale_inv": sha(*(scales for _, scales in pairs.values())),
    }
    assert record.tensors_of(f"{weight}_scale_inv") == tuple(f"{name}_scale_inv" for name in QKV)
    assert record.tensors_of(f"{weight}:codes") == tuple(QKV)
    assert record.held_bytes == 0


def test_experts_are_stacked() -> None:
    record = expectation()
    down = [pair(seed) for seed in (0, 1)]
    for expert, (codes, scales) in enumerate(down):
        record.add(f"{EXPERTS}.{expert}.down_proj.weight_scale_inv", scales)
        record.add(f"{EXPERTS}.{expert}.down_proj.weight", codes)
    checksums = record.checksums()
    assert checksums[f"{EXPERTS}.w2_weight"] == sha(*(values(*p) for p in down))
    assert checksums[f"{EXPERTS}.w2_weight_scale_inv"] == sha(*(scales for _, scales in down))


def test_gpu_engines_list_values_alone() -> None:
    record = expectation("cuda")
    codes, scales = pair(0)
    record.add(f"{ATTENTION}.o_proj.weight_scale_inv", scales)
    record.add(f"{ATTENTION}.o_proj.weight", codes)
    assert list(record.checksums()) == [f"{ATTENTION}.o_proj.weight"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_names_without_values_are_the_same(device: str) -> None:
    records = [expectation(device, compares_values=flag) for flag in (True, False)]
    codes, scales = pair(0)
    for record in records:
        record.add(f"{ATTENTION}.o_proj.weight", codes)
        record.add(f"{ATTENTION}.o_proj.weight_scale_inv", scales)
    assert records[0].checksums().keys() == records[1].checksums().keys()
    assert set(records[1].checksums().values()) == {""}


def checksums_of(name: str, codes: torch.Tensor, scales: torch.Tensor) -> dict[str, str]:
    record = expectation()
    record.add(f"{name}_scale_inv", scales)
    record.add(name, codes)
    return record.checksums()


def test_the_same_values_from_other_codes_and_scales_are_told_apart() -> None:
    """SGLang's own checksum is blind to them."""
    scales = pair(0)[1]
    ones = torch.ones(128, 256).to(torch.float8_e4m3fn)
    halves = torch.full((128, 256), 0.5).to(torch.float8_e4m3fn)
    name = f"{ATTENTION}.o_proj.weight"
    mine = checksums_of(name, ones, scales)
    other = checksums_of(name, halves, scales * 2)
    assert mine[name] == other[name]
    assert mine[f"{name}:codes"] != other[f"{name}:codes"]
    assert mine[f"{name}_scale_inv"] != other[f"{name}_scale_inv"]


def test_missing_halves_are_named() -> None:
    codes, scales = pair(0)
    name = f"{ATTENTION}.o_proj.weight"
    record = expectation()
    record.add(name, codes)
    with pytest.raises(ValueError, match=rf"incomplete: {name} has no scales"):
        record.checksums()
    record = expectation()
    record.add(f"{name}_scale_inv", scales)
    with pytest.raises(ValueError, match=rf"incomplete: {name}_scale_inv has no weight"):
        record.checksums()


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        (torch.ones(2, 2), r"shape \(2, 2\) instead of \(1, 2\)"),
        (torch.ones(1, 2, dtype=torch.bfloat16), "its scales torch.bfloat16"),
    ],
)
def test_scales_that_do_not_fit_are_named(scales: torch.Tensor, reason: str) -> None:
    record = expectation()
    name = f"{ATTENTION}.o_proj.weight"
    record.add(name, pair(0)[0])
    with pytest.raises(ValueError, match=rf"weight {name}: .*{reason}"):
        record.add(f"{name}_scale_inv", scales)
