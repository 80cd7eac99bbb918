"""Block quantisation on a GPU: one launch for a whole stack, one program per block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from espo_kernels.triton_launches import launch

FP8_MAX = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(2.0**-126)
# Scales below it are multiplied by 2^64 before a division, whose remainder could underflow.
SMALL_SCALE = tl.constexpr(2.0**-60)
TWO_TO_64 = tl.constexpr(2.0**64)


@triton.jit
def _e4m3_bits(x):
    """e4m3 bits of a float32, |x| ≤ 464, in integer arithmetic.

    The interpreter's cast loses rounding carries.
    """
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    rounded_bits = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded_bits - (120 << 3)  # exponent bias 127 → 7
    # Below 2^-6 the step is 2^-9: adding 2^23 units of it lets float32 addition round to nearest
    # even.
    steps = (tl.abs(x) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(tl.abs(x) < 0.015625, steps, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | sign).to(tl.uint8)


@triton.jit
def scale_of(amax, POWER_OF_TWO: tl.constexpr):
    """The scale of a block from its finite maximum: see `reference.block_scale`."""
    scale = tl.div_rn(amax, FP8_MAX)
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    if POWER_OF_TWO:
        up = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0xFF800000
        scale = up.to(tl.float32, bitcast=True)
    return tl.where(amax == 0, 1.0, scale)


@triton.jit
def _block_scale(w, POWER_OF_TWO: tl.constexpr):
    """The scale of a block; NaN if the block has a value that is not finite."""
    scale = scale_of(tl.max(tl.max(tl.abs(w), axis=1), axis=0), POWER_OF_TWO)
    # NaN may be lost in a maximum but not in a sum; w − w is NaN for infinities too.
    return scale + tl.sum(tl.sum(w - w, axis=1), axis=0)


@triton.jit
def divide(w, scale):
    """w / scale, rounded as IEEE 754 does. With `div_rn` the kernel takes 1.4 times as long.

    scale: of the block; |w / scale| ≤ 464. The first quotient is within two units of the last
    place. Each step adds remainder / scale; FMA computes the remainder without rounding. After
    the first step the quotient is one of the two neighbours of the true one, and Markstein's
    theorem (IBM Journal of Research and Development 34.1, 1990) says that the second step rounds
    it correctly
    (`tests/kernels/triton/test_triton_quantize.py::test_division_is_correctly_rounded`).
    """
    factor = tl.where(scale < SMALL_SCALE, TWO_TO_64, 1.0)
    w = w * factor
    divisor = tl.zeros_like(w) + scale * factor
    reciprocal = tl.zeros_like(w) + tl.div_rn(1.0, scale * factor)
    quotient = w * reciprocal
    quotient = tl.fma(tl.fma(-quotient, divisor, w), reciprocal, quotient)
    quotient = tl.fma(tl.fma(-quotient, divisor, w), reciprocal, quotient)
    return tl.where(w == 0.0, w, quotient)  # the steps make −0 a +0


@triton.jit
def to_fp8(y, EMULATE: tl.constexpr):
    """e4m3 bits of a float32, |y| ≤ 464. EMULATE: without the GPU's cast."""
    return _e4m3_bits(y) if EMULATE else y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def quantize_fp8_blockwise_kernel(
    weight,
    fp8,
    scale_inv,
    M,
    N,
    POWER_OF_TWO: tl.constexpr,
    EMULATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program of one block: column block, row block, matrix of the stack."""
    matrix = tl.program_id(2).to(tl.int64)
    m = tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (m < M - tl.program_id(1) * BLOCK) & (n < N)
    # 64 bits here, so that 32 are enough within the block's rows.
    first = (matrix * M + tl.program_id(1) * BLOCK) * N
    weight += first
    fp8 += first
    at = m * N + n
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    scale = _block_scale(w, POWER_OF_TWO)
    # The interpreter of Triton before 3.8 rounds twice in its FMA.
    y = tl.div_rn(w, scale) if EMULATE else divide(w, scale)
    tl.store(fp8 + at, to_fp8(y, EMULATE), mask=inside)
    row = matrix * tl.num_programs(1) + tl.program_id(1)
    tl.store(scale_inv + row * tl.num_programs(0) + tl.program_id(0), scale)


def quantize_triton(
    weight: torch.Tensor, block: int, power_of_two_scales: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8, scale_inv) of a contiguous [..., M, N] weight."""
    *stack, M, N = weight.shape
    rows = triton.cdiv(M, block)
    columns = triton.cdiv(N, block)
    matrices = weight[..., 0, 0].numel() if M and N else 0
    fp8 = torch.empty(weight.shape, dtype=torch.uint8, device=weight.device)
    scale_inv = torch.empty(*stack, rows, columns, dtype=torch.float32, device=weight.device)
    if matrices:
        launch(
            quantize_fp8_blockwise_kernel,
            (columns, rows, matrices),
            weight,
            fp8,
            scale_inv,
            M,
            N,
            POWER_OF_TWO=power_of_two_scales,
            EMULATE=not weight.is_cuda,
            BLOCK=block,
            # On an H200, blocks of 128 with 8 or 16 warps take 1.9 times as long as with 4.
            num_warps=4 if block <= 128 else 16,
        )
    return fp8.view(torch.float8_e4m3fn), scale_inv
