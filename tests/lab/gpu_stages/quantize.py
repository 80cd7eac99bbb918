"""FP8 quantization of expert weights: bytes and scales of the reference, error and speed."""

from __future__ import annotations

import time

import torch

from espo_kernels import quantize_fp8_blockwise
from tests.lab.gpu_stages.stage import Report, Setting, run

_BLOCK = 128
# Half the relative step of e4m3, which has three bits behind the leading one
_HALF_STEP = 2**-4
_TOLERANCE = 1.01  # the float32 scales are rounded


def quantize(setting: Setting, report: Report) -> None:
    """Quantize weights [experts, rows, columns] of one layer by kernel and by reference."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts, rows, columns = (2, 200, 256) if setting.small else (64, 1024, 1536)
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(experts, rows, columns, generator=generator, device=device).bfloat16()
    values, scales = quantize_fp8_blockwise(weight, block=_BLOCK)
    reference, reference_scales = quantize_fp8_blockwise(weight, block=_BLOCK, backend="reference")
    is_equal = torch.equal(values.view(torch.uint8), reference.view(torch.uint8))
    report.require("bytes_equal", is_equal)
    report.require("scales_equal", torch.equal(scales, reference_scales))
    _check_error(weight, values, scales, report)
    if device.type == "cuda":
        report.note("gb_s", round(_gigabytes_per_second(weight), 1))


def _check_error(
    weight: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, report: Report
) -> None:
    """Compare the rounding error of every value with half a step of its format."""
    rows, columns = weight.shape[-2:]
    row_scales = scales.repeat_interleave(_BLOCK, -2)[:, :rows]
    scale = row_scales.repeat_interleave(_BLOCK, -1)[..., :columns]
    error = (values.float() * scale - weight.float()).abs()
    # Below the smallest normal number, 2^-6, steps are 2^-9 of the block's scale.
    limit = _TOLERANCE * torch.maximum(weight.float().abs() * _HALF_STEP, scale * 2**-10)
    report.require_at_most("error_over_half_step", float((error / limit).max()), 1.0)
    report.note("mean_relative_error", float(error.mean() / weight.float().abs().mean()))


def _gigabytes_per_second(weight: torch.Tensor) -> float:
    """Bandwidth of reading bfloat16 and writing FP8, the best of ten after a first one."""
    best = float("inf")
    for _ in range(11):
        torch.cuda.synchronize()
        start = time.perf_counter()
        quantize_fp8_blockwise(weight, block=_BLOCK)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return 3 * weight.numel() / best / 1e9


if __name__ == "__main__":
    run(quantize)
