"""quantize_fp8_blockwise on expert matrices of Qwen3-30B-A3B, beside torchao and eager torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.implementation import BenchmarkCase, Goal, Implementation, Run
from bench.peers import Peer, torchao_quantizer
from espo_kernels import quantize_fp8_blockwise
from espo_kernels.backends import Backend

SHAPES = {"gate and up": (1536, 2048), "down": (2048, 768)}


def quantize_cases(
    device: torch.device, experts: int, *, with_peers: bool = True
) -> Iterator[BenchmarkCase]:
    """A stack of `experts` matrices of each shape, bfloat16."""
    peer = torchao_quantizer() if with_peers else Peer("torchao", None)
    for part, (M, N) in SHAPES.items():
        weight = torch.randn(experts, M, N, device=device, dtype=torch.bfloat16)
        implementations = [
            Implementation("espo_kernels", _ours(weight, "auto")),
            Implementation("eager", _ours(weight, "reference")),
        ]
        if peer.function is not None:
            implementations.append(Implementation(peer.name, _scales_of(peer.function, weight)))
        yield BenchmarkCase(
            operation="quantize_fp8_blockwise",
            part=part,
            shape=f"{experts} × {M} × {N}",
            dtype="bfloat16",
            bytes_moved=weight.nbytes + weight.numel(),
            input_bytes=weight.nbytes,
            implementations=tuple(implementations),
            absent={} if peer.function is not None else {peer.name: peer.reason},
            goal=Goal(least_of_copy=0.88),
        )


def _ours(weight: torch.Tensor, backend: Backend) -> Run:
    return lambda: quantize_fp8_blockwise(weight, backend=backend)[1:]


def _scales_of(function: Callable[..., Any], weight: torch.Tensor) -> Run:
    return lambda: [function(weight)[1].reshape(*weight.shape[:-2], weight.shape[-2] // 128, -1)]
