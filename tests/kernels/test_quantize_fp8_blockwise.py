"""Block quantisation: error bounds, edges and scales."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from espo_kernels import quantize_fp8_blockwise
from espo_kernels.quantize_fp8_blockwise.reference import quantize_reference

E4M3_ERROR = 2**-4  # half a step of three mantissa bits, relative to the value
SUBNORMAL_STEP = 2**-9


def dequantize(fp8: torch.Tensor, scale_inv: torch.Tensor, block: int) -> torch.Tensor:
    rows = scale_inv.repeat_interleave(block, dim=-2)[..., : fp8.shape[-2], :]
    return fp8.float() * rows.repeat_interleave(block, dim=-1)[..., : fp8.shape[-1]]


def random_weight(
    shape: tuple[int, ...], dtype: torch.dtype, size: float, seed: int
) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    limit = torch.finfo(dtype).max / 8
    weight = torch.randn(*shape, generator=rng) * min(size, limit)
    return weight.clamp(-limit, limit).to(dtype)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 3), max_size=2),
    st.integers(1, 70),
    st.integers(1, 70),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]),
    st.booleans(),
    st.integers(0, 2**31 - 1),
)
def test_quantization_error_is_at_most_half_a_step(
    stack: list[int], M: int, N: int, dtype: torch.dtype, size: float, power_of_two: bool, seed: int
) -> None:
    weight = random_weight((*stack, M, N), dtype, size, seed)
    fp8, scale_inv = quantize_fp8_blockwise(weight, block=32, power_of_two_scales=power_of_two)
    assert fp8.shape == weight.shape
    assert fp8.dtype == torch.float8_e4m3fn
    assert scale_inv.shape == (*stack, -(-M // 32), -(-N // 32))
    if power_of_two:
        assert (torch.frexp(scale_inv).mantissa == 0.5).all()
    step = dequantize(torch.ones_like(weight), scale_inv, 32) * SUBNORMAL_STEP
    bound = torch.maximum(weight.float().abs() * E4M3_ERROR * 1.0001, step)
    assert ((dequantize(fp8, scale_inv, 32) - weight.float()).abs() <= bound).all()


def test_largest_value_of_a_block_uses_the_whole_range() -> None:
    weight = torch.randn(256, 384)
    fp8, scale_inv = quantize_fp8_blockwise(weight)
    blocks = fp8.float().view(2, 128, 3, 128).abs().amax(dim=(1, 3))
    assert torch.equal(blocks, torch.full((2, 3), 448.0))
    torch.testing.assert_close(scale_inv, weight.view(2, 128, 3, 128).abs().amax(dim=(1, 3)) / 448)


def test_zero_huge_and_tiny_blocks() -> None:
    weight = torch.zeros(16, 64)
    weight[:, 16:32] = torch.finfo(torch.float32).max
    weight[:, 32:48] = 1e-40  # its scale would vanish
    weight[0, 48] = -3.0
    fp8, scale_inv = quantize_fp8_blockwise(weight, block=16)
    assert scale_inv[0, 0] == 1
    assert not fp8[:, :16].float().any()
    assert (fp8[:, 16:32].float() == 448).all()
    assert scale_inv[0, 2] == 2.0**-126
    assert torch.isfinite(fp8.float()).all()
    assert fp8[0, 48].float() == -448


def test_power_of_two_scales_do_not_clip() -> None:
    weight = torch.full((16, 16), 448.0)
    assert quantize_fp8_blockwise(weight, block=16, power_of_two_scales=True)[1].item() == 1.0
    weight[0, 0] = 449.0
    fp8, scale_inv = quantize_fp8_blockwise(weight, block=16, power_of_two_scales=True)
    assert scale_inv.item() == 2.0
    assert fp8.float().max() == 224.0


def test_stacked_experts_are_quantised_alone() -> None:
    experts = torch.randn(3, 40, 50, dtype=torch.bfloat16) * torch.tensor([1.0, 100.0, 0.01]).view(
        3, 1, 1
    )
    experts = experts.to(torch.bfloat16)
    fp8, scale_inv = quantize_fp8_blockwise(experts)
    for expert, its_fp8, its_scale in zip(experts, fp8, scale_inv, strict=True):
        alone = quantize_fp8_blockwise(expert)
        assert torch.equal(alone[0].view(torch.uint8), its_fp8.view(torch.uint8))
        assert torch.equal(alone[1], its_scale)
    transpose = experts.transpose(-1, -2)
    assert torch.equal(
        quantize_fp8_blockwise(transpose)[0].float(),
        quantize_fp8_blockwise(transpose.contiguous())[0].float(),
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    ("shape", "scales"),
    [((0, 5), (0, 1)), ((5, 0), (1, 0)), ((0, 4, 4), (0, 1, 1)), ((2, 0, 5), (2, 0, 1))],
)
def test_empty_weights_give_empty_results(
    backend: str, shape: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    fp8, scale_inv = quantize_fp8_blockwise(torch.zeros(shape), backend=backend)
    assert (fp8.shape, scale_inv.shape) == (shape, scales)


class Divisions(TorchDispatchMode):
    """Records the divisors of all divisions."""

    def __init__(self) -> None:
        super().__init__()
        self.divisors: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.div, torch.ops.aten.div_):
            self.divisors.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_no_division_by_a_number_of_the_host(dtype: torch.dtype, power_of_two: bool) -> None:
    """On CUDA, ATen divides a tensor by a number, or by a tensor of no dimension on the CPU, as
    a * (1 / b), "which may lose one bit of precision" (aten/src/ATen/native/cuda/
    BinaryDivTrueKernel.cu, `iter.is_cpu_scalar(2)`). Between two tensors of the device it divides
    as IEEE 754 does.
    """
    with Divisions() as divisions:
        quantize_reference(torch.empty(40, 50, dtype=dtype, device="meta"), 16, power_of_two)
    assert len(divisions.divisors) == 2
    for divisor in divisions.divisors:
        assert isinstance(divisor, torch.Tensor) and divisor.is_meta
