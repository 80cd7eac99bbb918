"""FP8 weights of the trainer in torch's block-wise FP8 product, as an engine multiplies them.

The product of e4m3 codes with their scales must equal the product of the dequantised numbers. It
runs on Hopper GPUs alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from espo_kernels import quantize_fp8_blockwise
from tests.lab.gpu_stages.stage import Report, Setting, StageSkipped, run

_BLOCK = 128
_FP8_MAX = 448.0
# Relative to the norm of a product. Outputs in bfloat16 are rounded by 0.17 %, and tensor cores
# keep about 13 bits of the sums of 128 products. Scales of other blocks differ by factors of 2.
MAX_ERROR = 0.01
# Each operand is rounded to three bits behind the leading one, by 2.6 % (root mean square):
# 3.7 % together.
MAX_QUANTIZATION_ERROR = 0.042
MAX_BFLOAT16_ERROR = 0.005
# Tokens, outputs and inputs. The first three are weights of Qwen3-30B-A3B.
SHAPES = {
    "expert up": (8192, 768, 2048),
    "expert down": (8192, 2048, 768),
    "query": (8192, 4096, 2048),
    "square": (8192, 8192, 8192),
}
SMALL_SHAPES = {"small": (96, 384, 640)}
_DTYPES = (torch.bfloat16, torch.float32)
_WARM_UP_RUNS = 5
_RUNS = 50

Scales = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Operands:
    """Both factors of a product tokens[M, K] · weight[N, K]ᵀ, in bfloat16 and quantised.

    codes: e4m3, in the shapes of tokens and weight. token_scales [M, K / 128] and weight_scales
    [⌈N / 128⌉, ⌈K / 128⌉]: float32 factors of the codes.
    """

    tokens: torch.Tensor
    weight: torch.Tensor
    token_codes: torch.Tensor
    weight_codes: torch.Tensor
    token_scales: torch.Tensor
    weight_scales: torch.Tensor

    def exact(self) -> torch.Tensor:
        """The product of the bfloat16 numbers, float32 [M, N]."""
        return self.tokens.float() @ self.weight.float().T

    def dequantized_product(self) -> torch.Tensor:
        """The product of codes times scales, float32 [M, N]."""
        return self._token_values() @ self._weight_values().T

    def product(self, scales: Scales, dtype: torch.dtype) -> torch.Tensor:
        """The product of torch's FP8 kernel, [M, N] in `dtype`."""
        return F.scaled_mm(
            self.token_codes,
            self.weight_codes.T,
            scales[0],
            F.ScalingType.BlockWise1x128,
            scales[1],
            F.ScalingType.BlockWise128x128,
            output_dtype=dtype,
        )

    def layouts(self) -> Iterator[tuple[str, Scales]]:
        """Yield the layouts of scales by name, the one that torch's rules ask for first.

        Its scales of tokens are [M, L] with strides (1, M), and the weight's scales [L4, N / 128]
        with strides (1, L4). L is K / 128, and L4 is L rounded up to a multiple of 4.
        """
        by_block = self.token_scales.T.contiguous().T
        blocks = self.weight_scales.shape[1]
        padded_scales = F.pad(self.weight_scales, (0, -blocks % 4))
        yield "blocks first, padded to 4", (by_block, padded_scales.T)
        yield "blocks first", (by_block, self.weight_scales.T)
        yield "as quantized", (self.token_scales, self.weight_scales)

    def _token_values(self) -> torch.Tensor:
        return self.token_codes.float() * self.token_scales.repeat_interleave(_BLOCK, 1)

    def _weight_values(self) -> torch.Tensor:
        rows = self.weight_scales.repeat_interleave(_BLOCK, 0)
        return self.weight_codes.float() * rows.repeat_interleave(_BLOCK, 1)


def fp8_product(setting: Setting, report: Report) -> None:
    """Compare errors of the product, and time it beside bfloat16. CPUs check the quantisation."""
    if setting.small:
        for name, shape in SMALL_SHAPES.items():
            operands = make_operands(*shape, torch.device("cpu"))
            check_quantization(name, operands, report)
            _check_layout(name, operands, report)
        return
    _require_hopper()
    torch.set_float32_matmul_precision("highest")
    for name, shape in SHAPES.items():
        operands = make_operands(*shape, torch.device("cuda"))
        check_quantization(name, operands, report)
        scales = check_product(name, operands, report)
        _note_speed(name, operands, scales, report)


def _require_hopper() -> None:
    if not torch.cuda.is_available():
        raise StageSkipped("it needs CUDA")
    if not _has_scaled_mm():
        raise StageSkipped(f"torch {torch.__version__} has no torch.nn.functional.scaled_mm")
    major, minor = torch.cuda.get_device_capability()
    if major != 9:
        raise StageSkipped(
            "torch's block-wise FP8 product runs on compute capability 9.x alone, and this device "
            f"has {major}.{minor}"
        )


def _has_scaled_mm() -> bool:
    return hasattr(F, "scaled_mm")


def make_operands(tokens: int, outputs: int, inputs: int, device: torch.device) -> Operands:
    """Random operands, whose blocks have sizes that differ by powers of two from 1/8 to 8.

    A scale of another block therefore shows. All three sizes are multiples of 4, and inputs and
    outputs of 128.
    """
    generator = torch.Generator(device).manual_seed(0)

    def random(rows: int, block_rows: int) -> torch.Tensor:
        sizes = torch.randint(
            -3, 4, (rows // block_rows, inputs // _BLOCK), generator=generator, device=device
        )
        factors = torch.exp2(sizes.float()).repeat_interleave(block_rows, 0)
        values = torch.randn(rows, inputs, generator=generator, device=device)
        return (values * factors.repeat_interleave(_BLOCK, 1)).bfloat16()

    token_values = random(tokens, 1)
    weight = random(outputs, _BLOCK)
    weight_codes, weight_scales = quantize_fp8_blockwise(weight, block=_BLOCK)
    token_codes, token_scales = _quantize_tokens(token_values)
    return Operands(token_values, weight, token_codes, weight_codes, token_scales, weight_scales)


def _quantize_tokens(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e4m3 codes [M, K], scales [M, K / 128]): one scale for 128 inputs of a token."""
    groups = values.float().unflatten(1, (-1, _BLOCK))
    scales = groups.abs().amax(-1).clamp_min(1e-12) / _FP8_MAX
    codes = (groups / scales[..., None]).to(torch.float8_e4m3fn)
    return codes.flatten(1), scales


def check_quantization(name: str, operands: Operands, report: Report) -> None:
    """Compare the errors of FP8 and bfloat16 with their limits."""
    exact = operands.exact()
    error = relative_error(operands.dequantized_product(), exact)
    report.require_at_most(f"{name} quantization_error", error, MAX_QUANTIZATION_ERROR)
    bfloat16_error = relative_error(operands.tokens @ operands.weight.T, exact)
    report.require_at_most(f"{name} bfloat16_error", bfloat16_error, MAX_BFLOAT16_ERROR)


def relative_error(result: torch.Tensor, reference: torch.Tensor) -> float:
    """‖result − reference‖ / ‖reference‖, with Frobenius norms."""
    return float((result.float() - reference).norm() / reference.norm())


def check_product(name: str, operands: Operands, report: Report) -> Scales | None:
    """Compare torch's FP8 product with the dequantised one. Returns the scales in a right layout.

    Layouts are tried until one is right in bfloat16. The others are noted with their errors.
    """
    reference = operands.dequantized_product()
    for layout, scales in operands.layouts():
        outcome = _error_or_refusal(operands, scales, torch.bfloat16, reference)
        if isinstance(outcome, float) and outcome <= MAX_ERROR:
            report.note(f"{name} layout", layout)
            break
        report.note(f"{name} with scales {layout}", outcome)
    else:
        report.require(f"{name} has_a_right_layout", False)
        return None
    for dtype in _DTYPES:
        key = f"{name} {str(dtype).removeprefix('torch.')} error_to_dequantized"
        outcome = _error_or_refusal(operands, scales, dtype, reference)
        if isinstance(outcome, float):
            report.require_at_most(key, outcome, MAX_ERROR)
        else:
            report.note(key, outcome)
            report.require(f"{key} is_a_number", False)
    return scales


def _error_or_refusal(
    operands: Operands, scales: Scales, dtype: torch.dtype, reference: torch.Tensor
) -> float | str:
    """The relative error of a product, or why torch refuses it."""
    try:
        return relative_error(operands.product(scales, dtype), reference)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0][:200]


def _check_layout(name: str, operands: Operands, report: Report) -> None:
    """Ask torch whether it takes the first layout, with tensors without data."""
    if not _has_scaled_mm():
        report.note(f"{name} layout", f"torch {torch.__version__} has no scaled_mm")
        return
    fields = (getattr(operands, field.name) for field in dataclasses.fields(operands))
    without_data = Operands(*(tensor.to("meta") for tensor in fields))
    layout, scales = next(without_data.layouts())
    product = without_data.product(scales, torch.bfloat16)
    report.note(f"{name} layout", layout)
    shape = (len(operands.tokens), len(operands.weight))
    report.require(f"{name} layout_is_taken", product.shape == shape)


def _note_speed(name: str, operands: Operands, scales: Scales | None, report: Report) -> None:
    """Note the TFLOP/s of FP8, if there is a right layout, and of bfloat16."""
    M, K = operands.tokens.shape
    operations = 2 * M * K * len(operands.weight)
    weight = operands.weight.T
    runs: dict[str, Callable[[], torch.Tensor]] = {"bfloat16": lambda: operands.tokens @ weight}
    if scales is not None:
        right_scales = scales
        runs["fp8"] = lambda: operands.product(right_scales, torch.bfloat16)
    for kind, multiply in runs.items():
        report.note(f"{name} {kind} tflop_s", round(operations / _seconds(multiply) / 1e12, 1))


def _seconds(multiply: Callable[[], torch.Tensor]) -> float:
    """Seconds of one run on the stream, the mean of `_RUNS` after a warm-up."""
    for _ in range(_WARM_UP_RUNS):
        multiply()
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(_RUNS):
        multiply()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / _RUNS


if __name__ == "__main__":
    run(fp8_product)
