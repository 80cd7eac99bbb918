"""The Triton kernel of `quantize_fp8_blockwise`: the same bits as the reference."""

import pytest
import torch

from espo_kernels import quantize_fp8_blockwise

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_same_bits_as_the_reference(dtype: torch.dtype, power_of_two: bool) -> None:
    weight = torch.randn(2, 3, 40, 50)
    weight[0, 0, :16, :16] = 0
    weight[0, 1] *= 1e-6
    weight[1, 1, 16:] *= 300
    weight[1, 2] = 2.0 ** torch.randint(-20, 4, (40, 50)).float()
    weight = weight.to(DEVICE, dtype)
    options = {"block": 16, "power_of_two_scales": power_of_two}
    fp8, scale_inv = quantize_fp8_blockwise(weight, backend="triton", **options)
    expected_fp8, expected_scale = quantize_fp8_blockwise(weight, backend="reference", **options)
    assert torch.equal(scale_inv, expected_scale)
    assert torch.equal(fp8.view(torch.uint8), expected_fp8.view(torch.uint8))


def test_every_rounding_case_of_the_format() -> None:
    """All float32 midpoints between adjacent e4m3 values, and their neighbours, with scale 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[:-1] + codes[1:]) / 2
    near = torch.cat([codes, midpoints, midpoints * (1 + 2**-22), midpoints * (1 - 2**-22)])
    weight = torch.zeros(1, 1024)
    weight[0, : near.numel()] = near
    weight[0, 512 : 512 + near.numel()] = -near
    weight[0, 1023] = 448.0
    fp8, scale_inv = quantize_fp8_blockwise(weight.to(DEVICE), block=1024, backend="triton")
    assert scale_inv.item() == 1
    assert torch.equal(
        fp8.view(torch.uint8).cpu(), weight.to(torch.float8_e4m3fn).view(torch.uint8)
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_weights_come_out_as_nan_scales(value: float) -> None:
    from espo_kernels.quantize_fp8_blockwise.triton_kernel import quantize_triton

    weight = torch.ones(20, 20, device=DEVICE)
    weight[17, 3] = value
    _, scale_inv = quantize_triton(weight, 16, False)
    assert scale_inv.isnan().tolist() == [[False, False], [True, False]]
