"""Attention over packed sequences in bfloat16, compared with padded batches in float32."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_rl.mcore.layers.attention import PackedAttention
from tests.lab.gpu_stages.stage import Report, Setting, run

_HEADS = 16
_GROUPS = 4
_DIM = 128
# For values of size 1 in bfloat16, whose rounding error is 0.004
MAX_ERROR = 0.02


def attention(setting: Setting, report: Report) -> None:
    """Compare output and gradients of one packed batch, then time a large one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    lengths = [7, 64, 33, 1] if setting.small else [700, 3000, 128, 1, 2048, 2315]
    results = _output_and_gradients(lengths, device, torch.bfloat16)
    references = _output_and_gradients(lengths, device, torch.float32)
    names = ("output", "query_grad", "key_grad", "value_grad")
    for name, result, reference in zip(names, results, references, strict=True):
        error = (result.float() - reference).abs().max() / reference.abs().max()
        report.require_at_most(f"{name}_error", float(error), MAX_ERROR)
    module = _module()
    report.note("varlen_available", module._varlen.is_available)
    probe = torch.zeros(1, 1, _DIM, device=device, dtype=torch.bfloat16)
    is_used = module._varlen.supports(probe, probe, probe)
    is_expected = device.type == "cuda" and bool(module._varlen.is_available)
    report.require("varlen_used_where_it_should", is_used == is_expected)
    if device.type == "cuda" and not setting.small:
        report.note("16k_tokens_ms", _milliseconds([4096] * 4, device))


def _module() -> Any:
    config: Any = SimpleNamespace(context_parallel_size=1)
    return PackedAttention(config, 1, None, "self")


def _inputs(
    lengths: list[int], device: torch.device, dtype: torch.dtype
) -> tuple[list[torch.Tensor], PackedSeqParams]:
    """Make query, key and value, whose numbers are the same in both precisions."""
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(sum(lengths), heads, _DIM, generator=generator)
        for heads in (_HEADS, _GROUPS, _GROUPS)
    ]
    inputs = [value.bfloat16().to(device, dtype).requires_grad_() for value in values]
    bounds = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
    return inputs, params


def _output_and_gradients(
    lengths: list[int], device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    inputs, params = _inputs(lengths, device, dtype)
    out = _module()(*inputs, None, packed_seq_params=params)
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    output_grad = noise.bfloat16().to(device, dtype)
    return [out.detach(), *torch.autograd.grad(out, inputs, output_grad)]


def _milliseconds(lengths: list[int], device: torch.device) -> float:
    """Time forward and backward, the best of five after a first one."""
    inputs, params = _inputs(lengths, device, torch.bfloat16)
    module = _module()
    best = float("inf")
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        module(*inputs, None, packed_seq_params=params).sum().backward()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return round(best * 1e3, 3)


if __name__ == "__main__":
    run(attention)
