"""Products of FP8 weights on CPUs, and the rounding of their inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_bridge.cpu_shim.block_fp8 import (
    dequantize,
    list_codes_and_scales,
    replace_products,
    round_activations,
    selected_rounding,
)
from sglang_bridge.cpu_shim.trainer_sums import experts, linear

ROUND = "SGLANG_BRIDGE_ROUND_ACTIVATIONS"


def rows(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(256, 384), (3, 128, 256), (200, 300)])
def test_weights_are_codes_times_scales(shape: tuple[int, ...]) -> None:
    codes = rows(*shape).to(torch.float8_e4m3fn)
    *stack, M, N = shape
    scales = torch.rand(*stack, -(-M // 128), -(-N // 128)) + 0.5
    result = dequantize(codes, scales, (128, 128))
    assert result.dtype == torch.float32 and result.shape == codes.shape
    for m in (0, 127, M - 1):
        for n in (0, 127, 128, N - 1):
            expected = codes[..., m, n].float() * scales[..., m // 128, n // 128]
            assert torch.equal(result[..., m, n], expected)


def test_every_code_has_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    result = dequantize(codes, torch.ones(1, 2), (128, 128))
    assert torch.equal(result.nan_to_num(7.0), codes.float().nan_to_num(7.0))


def test_activations_are_rounded_128_at_a_time() -> None:
    x = torch.zeros(2, 256)
    x[0, :2] = torch.tensor([448.0, 17.0])  # scale 1: between 16 and 18, ties to even
    x[0, 128:130] = torch.tensor([44.8, 1.7])  # scale 0.1
    x[1, 0] = 3.0
    result = round_activations(x)
    assert result[0, :2].tolist() == [448.0, 16.0]
    torch.testing.assert_close(result[0, 128:130], torch.tensor([44.8, 1.6]))
    assert result[1, 0] == 3.0
    assert not result[1, 1:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_of_an_activation_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    x = (rows(50, 200) * 3).to(dtype)
    result = round_activations(x)
    assert result.dtype == torch.float32
    step = x.float().abs() / 16 + x.float().abs().amax(dim=1, keepdim=True) / 448 * 2**-9
    assert ((result - x.float()).abs() <= step).all()


def test_a_row_is_rounded_alone() -> None:
    x = rows(9, 256) * torch.tensor([10.0**n for n in range(-4, 5)])[:, None]
    alone = torch.cat([round_activations(row[None]) for row in x])
    assert torch.equal(round_activations(x), alone)


def test_the_environment_selects_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rows(3, 128)
    monkeypatch.delenv(ROUND, raising=False)
    assert torch.equal(selected_rounding()(x), round_activations(x))
    monkeypatch.setenv(ROUND, "0")
    assert torch.equal(selected_rounding()(x), x)
    assert selected_rounding()(x.bfloat16()).dtype == torch.float32


def fake_fp8() -> Any:
    """SGLang's module, as far as it is replaced."""

    class Fp8Config:
        @classmethod
        def get_supported_act_dtypes(cls) -> list[torch.dtype]:
            return [torch.bfloat16]

    methods = {"block_quant": True, "use_mxfp8": False, "weight_block_size": [128, 128]}
    return SimpleNamespace(
        Fp8Config=Fp8Config,
        Fp8LinearMethod=type("Fp8LinearMethod", (), dict(methods)),
        Fp8MoEMethod=type("Fp8MoEMethod", (), dict(methods)),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rounds", ["0", "1"])
def test_the_linear_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rounds: str
) -> None:
    monkeypatch.setenv(ROUND, rounds)
    fp8 = fake_fp8()
    replace_products(fp8)
    layer = SimpleNamespace(
        weight=rows(256, 128, seed=1).to(torch.float8_e4m3fn),
        weight_scale_inv=torch.tensor([[0.5], [0.25]]),
    )
    x = rows(2, 5, 128).to(dtype)
    method = fp8.Fp8LinearMethod()
    method.process_weights_after_loading_block_quant(layer)
    result = method.apply(layer, x)
    assert (result.dtype, result.shape) == (dtype, (2, 5, 256))
    weight = dequantize(layer.weight, layer.weight_scale_inv, (128, 128))
    flat = x.reshape(-1, 128)
    inputs = round_activations(flat) if rounds == "1" else flat.float()
    assert torch.equal(result.view(-1, 256), linear(inputs, weight).to(dtype))
    assert torch.float32 in fp8.Fp8Config.get_supported_act_dtypes()


def test_ranks_that_share_the_input_round_it_as_one_does() -> None:
    """A rank's part of a row begins at a multiple of 128, so it has whole groups."""
    fp8 = fake_fp8()
    replace_products(fp8)
    codes = rows(128, 512, seed=1).to(torch.float8_e4m3fn)
    scales = torch.rand(1, 4) + 0.5
    x = rows(6, 512) * torch.tensor([1.0, 3.0, 0.1, 30.0]).repeat_interleave(128)

    def product(first: int, end: int) -> torch.Tensor:
        layer = SimpleNamespace(
            weight=codes[:, first:end].contiguous(),
            weight_scale_inv=scales[:, first // 128 : end // 128].contiguous(),
        )
        return torch.Tensor(fp8.Fp8LinearMethod().apply(layer, x[:, first:end]))

    whole = product(0, 512)
    torch.testing.assert_close(product(0, 256) + product(256, 512), whole, rtol=1e-5, atol=1e-4)


def test_other_formats_are_refused() -> None:
    fp8 = fake_fp8()
    replace_products(fp8)
    method = fp8.Fp8LinearMethod()
    method.use_mxfp8 = True
    with pytest.raises(ValueError, match="float32 scales only"):
        method.process_weights_after_loading_block_quant(SimpleNamespace())


def test_experts_without_rounding_are_those_of_the_trainer() -> None:
    x = rows(6, 128)
    weights = torch.rand(6, 2)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0], [2, 1]])
    gate_up = rows(3, 256, 128, seed=1) / 10
    down = rows(3, 128, 128, seed=2) / 10
    plain = experts(x, gate_up, down, weights, ids)
    assert torch.equal(plain, experts(x, gate_up, down, weights, ids, rounding=torch.Tensor.float))
    rounded_output = experts(x, gate_up, down, weights, ids, rounding=round_activations)
    error = float((rounded_output - plain).norm() / plain.norm())
    assert 0.005 < error < 0.05


def test_codes_and_scales_are_listed_beside_values() -> None:
    state = {"w.weight": torch.zeros(2), "w.weight_scale_inv": torch.ones(1)}

    class WeightChecker:
        def handle(self, action: str, *, role: str) -> dict[str, Any]:
            assert action == "checksum"
            return self._compute_checksum(role=role)

        def _compute_checksum(self, skip_tensor_list: Any = None, *, role: str) -> dict[str, Any]:
            return {"checksums": {"w.weight": "values"}, "role": role}

        def _model_state(self) -> Any:
            return iter(state.items())

        def _get_model(self) -> None: ...

    module = SimpleNamespace(
        WeightChecker=WeightChecker,
        _build_quantized_set=lambda model: {
            "w.weight": SimpleNamespace(scale_name="w.weight_scale_inv")
        },
        _hash_tensor=lambda tensor: f"hash of {tensor.tolist()}",
    )
    list_codes_and_scales(module)
    info = WeightChecker().handle("checksum", role="target")
    assert info["role"] == "target"
    assert info["checksums"] == {
        "w.weight": "values",
        "w.weight:codes": "hash of [0.0, 0.0]",
        "w.weight_scale_inv": "hash of [1.0]",
    }
