"""Attention over packed sequences: torch's variable-length kernel against padded batches in higher
precision.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from launch.gpu_stages.stage import Report, Setting, run
from megatron_rl.mcore.layers.attention import PackedAttention

_HEADS, _GROUPS, _DIM = 16, 4, 128
MOST_ERROR = 0.02  # of values of size 1 in bfloat16, whose rounding is 0.004


def attention(setting: Setting, report: Report) -> None:
    """Compare output and gradients of one packed batch, then time a large one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = [7, 64, 33, 1] if setting.small else [700, 3000, 128, 1, 2048, 2315]
    half, exact = (_gradients(lengths, device, dtype) for dtype in (torch.bfloat16, torch.float32))
    for name, ours, theirs in zip(
        ("output", "query_grad", "key_grad", "value_grad"), half, exact, strict=True
    ):
        report.at_most(
            f"{name}_error",
            float((ours.float() - theirs).abs().max() / theirs.abs().max()),
            MOST_ERROR,
        )
    module = _module()
    report.note("varlen_available", module._varlen.available)
    probe = torch.zeros(1, 1, _DIM, device=device, dtype=torch.bfloat16)
    report.holds(
        "varlen_used_where_it_should",
        module._varlen.supports(probe, probe, probe) == (device.type == "cuda"),
    )
    if device.type == "cuda":
        report.note("16k_tokens_ms", _milliseconds([4096] * 4, device))


def _module() -> Any:
    return PackedAttention(SimpleNamespace(context_parallel_size=1), 1, None, "self")  # type: ignore[arg-type]


def _inputs(
    lengths: list[int], device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], PackedSeqParams]:
    generator = torch.Generator().manual_seed(0)
    drawn = [
        torch.randn(sum(lengths), heads, _DIM, generator=generator)
        for heads in (_HEADS, _GROUPS, _GROUPS)
    ]
    inputs = [
        t.bfloat16().to(device, dtype).requires_grad_() for t in drawn
    ]  # both precisions get the same numbers
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return inputs, params


def _gradients(lengths: list[int], device: torch.device, dtype: torch.dtype) -> list[torch.Tensor]:
    inputs, params = _inputs(lengths, device, dtype)
    out = _module()(*inputs, None, packed_seq_params=params)
    seed = (
        torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        .bfloat16()
        .to(device, dtype)
    )
    return [out.detach(), *torch.autograd.grad(out, inputs, seed)]


def _milliseconds(lengths: list[int], device: torch.device) -> float:
    """Forward and backward, the best of five."""
    inputs, params = _inputs(lengths, device, torch.bfloat16)
    module, best = _module(), float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        module(*inputs, None, packed_seq_params=params).sum().backward()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return round(best * 1e3, 3)


if __name__ == "__main__":
    run(attention)
