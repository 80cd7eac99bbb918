"""Weights rounded as a narrower engine would hold them: a simulation of weight rounding alone.

An engine that serves them still computes in its own precision, with activations and products that
nobody rounded.
"""

from __future__ import annotations

import re
from typing import Literal

import torch

from megatron_rl.mcore.weights.export import NamedTensors
from sglang_bridge.weights.fused_layout import held_dtype

Simulation = Literal["off", "bf16", "fp8_blockwise"]

_BLOCK = 128
# The linear layers of attention, MLPs and experts, as DeepSeek-V3's FP8 checkpoint has them (arXiv
# 2412.19437, 3.3); embeddings, norms, routers with their biases and the output layer keep their
# precision
_LINEAR = re.compile(
    r"model\.layers\.\d+\.(?:self_attn|mlp|block_sparse_moe)\..*(?:_proj|_proj_with_mqa|w[123])\.weight"
)


def rounded(weights: NamedTensors, simulation: Simulation) -> NamedTensors:
    """The stream with what `simulation` rounds rounded; names, shapes and dtypes stay.

    bf16: what an engine with --dtype bfloat16 holds in it, to the nearest. fp8_blockwise: linear
    layers, to e4m3 with a float32 scale for each 128 x 128 block of the whole matrix.
    """
    for name, tensor in weights:
        if simulation == "bf16":
            yield name, tensor.to(held_dtype(name, torch.bfloat16)).to(tensor.dtype)
        elif simulation == "fp8_blockwise" and is_linear(name):
            yield name, _through_fp8(tensor)
        else:
            yield name, tensor


def is_linear(name: str) -> bool:
    """Whether a tensor of this Hugging Face name is a matrix that an FP8 engine quantises."""
    return _LINEAR.fullmatch(name) is not None


def _through_fp8(weight: torch.Tensor) -> torch.Tensor:
    """[M, N] -> [M, N]."""
    from espo_kernels import (
        quantize_fp8_blockwise,  # loads the kernels, which other runs do without
    )

    fp8, scale_inv = quantize_fp8_blockwise(weight.float().contiguous(), block=_BLOCK)
    rows, columns = weight.shape
    scale = scale_inv.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
    return (fp8.float() * scale).to(weight.dtype)
