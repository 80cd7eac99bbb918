"""The Triton kernel of `quantize_fp8_blockwise`: the same bits as the reference."""

import pytest
import torch
import triton
import triton.language as tl

from espo_kernels import quantize_fp8_blockwise
from espo_kernels.quantize_fp8_blockwise import triton_kernel
from espo_kernels.quantize_fp8_blockwise.reference import block_scale

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


@triton.jit
def scale_and_code_kernel(
    maxima, values, scales, codes, POWER_OF_TWO: tl.constexpr, EMULATE: tl.constexpr
):
    """The scale of each maximum, and the code of a value with that scale."""
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    scale = triton_kernel.scale_of(tl.load(maxima + at).to(tl.float32), POWER_OF_TWO)
    quotient = tl.div_rn(tl.load(values + at).to(tl.float32), scale)
    tl.store(scales + at, scale)
    tl.store(codes + at, triton_kernel.to_fp8(quotient, EMULATE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_same_scales_and_codes_for_many_maxima(dtype: torch.dtype, power_of_two: bool) -> None:
    """102,400 maxima. `quantize_reference` divides by the same scale."""
    count = 100 * 1024
    maxima = (torch.randn(count).abs() * 10.0 ** torch.empty(count).uniform_(-4, 2)).to(dtype)
    values = (maxima * torch.empty(count).uniform_(-1, 1)).to(dtype)
    maxima = maxima.to(DEVICE)
    values = values.to(DEVICE)
    scales = torch.empty(count, device=DEVICE)
    codes = torch.empty(count, dtype=torch.uint8, device=DEVICE)
    scale_and_code_kernel[(count // 1024,)](
        maxima, values, scales, codes, POWER_OF_TWO=power_of_two, EMULATE=DEVICE.type == "cpu"
    )
    reference = block_scale(maxima.float(), power_of_two)
    assert torch.equal(scales, reference)
    expected_codes = (values.float() / reference).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(reference.cpu(), block_scale(maxima.cpu().float(), power_of_two))


@triton.jit
def divide_kernel(weights, scales, quotients):
    at = tl.program_id(0) * 1024 + tl.arange(0, 1024)
    quotient = triton_kernel.divide(tl.load(weights + at), tl.load(scales + at))
    tl.store(quotients + at, quotient)


def division_cases() -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and scales, float32, 128 × 1024 each. |weight| ≤ 464 scale."""
    rng = torch.Generator().manual_seed(0)
    shape = (64, 1024)
    # All exponents of a scale, from 2^-126 to 2^117: random mantissas, all ones, all zeros.
    scale_bits = torch.randint(0x00800000, 0x7A800000, shape, generator=rng, dtype=torch.int32)
    scale_bits[:16] |= 0x7FFFFF
    scale_bits[16:32] &= ~0x7FFFFF
    scales = scale_bits.view(torch.float32)
    ratios = torch.empty(shape).uniform_(-464, 464, generator=rng)
    ratios *= 2.0 ** torch.randint(-20, 1, shape, generator=rng)
    # Quotients just beside a code's rounding border, where one wrong bit shows.
    borders = torch.tensor([1.0625, 1.9375, 447.99997, 416.0, 0.0009765625])
    ratios[::4] = borders[torch.randint(0, 5, (16, 1024), generator=rng)]
    products = ratios * scales
    near = products.view(torch.int32) + torch.randint(-2, 3, shape, generator=rng)
    near = near.to(torch.int32).view(torch.float32)
    weights = torch.where(products == 0, products, near)
    weights[0, :8] = torch.tensor([0.0, -0.0] * 4)
    return torch.cat([products, weights]), torch.cat([scales, scales])


def test_division_is_correctly_rounded() -> None:
    """The GPU's division gives the bits of IEEE 754. A quotient below 2^-11 has the code 0."""
    weights, scales = division_cases()
    expected = weights / scales
    quotients = torch.empty_like(expected, device=DEVICE)
    divide_kernel[(128,)](weights.to(DEVICE), scales.to(DEVICE), quotients)
    quotients = quotients.cpu()
    matters = expected.abs() >= 2.0**-11
    # Quotients of triton 3.7's interpreter may differ in their last bit.
    is_exact = DEVICE.type == "cuda" or not triton.__version__.startswith("3.7.")
    tolerance = 0 if is_exact else 2.0**-23
    torch.testing.assert_close(quotients[matters], expected[matters], rtol=tolerance, atol=0)
    assert (quotients[~matters].abs() < 2.0**-11).all()
    assert torch.equal(quotients.signbit(), expected.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_backends_give_the_same_bits(dtype: torch.dtype) -> None:
    weight = (torch.randn(4, 16, 10, 16) * torch.rand(4, 1, 10, 1)).view(64, 160).to(dtype)
    results = [
        quantize_fp8_blockwise(weight.to(DEVICE), block=16, backend="triton"),
        quantize_fp8_blockwise(weight.to(DEVICE), block=16, backend="reference"),
        quantize_fp8_blockwise(weight, block=16, backend="cpu"),
    ]
    codes = [fp8.view(torch.uint8).cpu() for fp8, _ in results]
    scales = [scale_inv.cpu() for _, scale_inv in results]
    assert torch.equal(scales[0], scales[1]) and torch.equal(scales[1], scales[2])
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[1], codes[2])


def test_every_rounding_case_of_the_format() -> None:
    """All float32 midpoints between adjacent e4m3 values, and their neighbours, with scale 1."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[:-1] + codes[1:]) / 2
    near = torch.cat([codes, midpoints, midpoints * (1 + 2**-22), midpoints * (1 - 2**-22)])
    weight = torch.zeros(128 * 128)
    weight[: near.numel()] = near
    weight[8192 : 8192 + near.numel()] = -near
    weight[-1] = 448.0
    weight = weight.view(128, 128)
    fp8, scale_inv = quantize_fp8_blockwise(weight.to(DEVICE), block=128, backend="triton")
    assert scale_inv.item() == 1
    assert torch.equal(
        fp8.view(torch.uint8).cpu(), weight.to(torch.float8_e4m3fn).view(torch.uint8)
    )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_weights_come_out_as_nan_scales(value: float) -> None:
    weight = torch.ones(20, 20, device=DEVICE)
    weight[17, 3] = value
    _, scale_inv = triton_kernel.quantize_triton(weight, 16, False)
    assert scale_inv.isnan().tolist() == [[False, False], [True, False]]
