"""FP8 quantisation of expert weights: every byte and scale of the reference's, its error, and its
speed.
"""

from __future__ import annotations

import time

import torch

from espo_kernels import quantize_fp8_blockwise
from launch.gpu_stages.stage import Report, Setting, run

_BLOCK = 128
_HALF_STEP = 2**-4  # relative: e4m3 has three bits behind the leading one
_ROOM = 1.01  # float32 scales round


def quantize(setting: Setting, report: Report) -> None:
    """Weights [experts, rows, columns] of one layer, by the kernel and by the reference."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    experts, rows, columns = (2, 200, 256) if setting.small else (64, 1024, 1536)
    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn(experts, rows, columns, generator=generator, device=device).bfloat16()
    bytes_, scales = quantize_fp8_blockwise(weight, block=_BLOCK)
    expected, expected_scales = quantize_fp8_blockwise(weight, block=_BLOCK, backend="reference")
    report.holds("bytes_equal", torch.equal(bytes_.view(torch.uint8), expected.view(torch.uint8)))
    report.holds("scales_equal", torch.equal(scales, expected_scales))
    whole = scales.repeat_interleave(_BLOCK, -2)[:, :rows].repeat_interleave(_BLOCK, -1)[
        ..., :columns
    ]
    error = (bytes_.float() * whole - weight.float()).abs()
    # below the smallest normal number, 2^-6, steps are 2^-9 of the block's scale
    allowed = _ROOM * torch.maximum(weight.float().abs() * _HALF_STEP, whole * 2**-10)
    report.at_most("error_over_half_step", float((error / allowed).max()), 1.0)
    report.note("mean_relative_error", float(error.mean() / weight.float().abs().mean()))
    if device.type == "cuda":
        report.note("gb_s", round(_gigabytes_per_second(weight), 1))


def _gigabytes_per_second(weight: torch.Tensor) -> float:
    """bfloat16 read and FP8 written, the best of ten."""
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
