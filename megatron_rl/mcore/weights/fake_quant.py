"""Rounds weights to a narrower format and back to their dtype (`engine.fake_quant`).

This simulates the rounding of weights alone. An engine that serves these weights still computes
activations and products in its own precision.
"""

from __future__ import annotations

import re
from typing import Literal

import torch

from megatron_rl.mcore.weights.export import NamedTensors
from sglang_bridge.weights.fused_layout import engine_dtype

FakeQuant = Literal["off", "bf16", "fp8_blockwise"]

_BLOCK = 128
# The linear layers of attention, MLPs and experts, as in DeepSeek-V3's FP8 checkpoint (arXiv
# 2412.19437, section 3.3). Embeddings, norms, routers with their biases and the output layer keep
# their precision.
_LINEAR = re.compile(
    r"model\.layers\.\d+\.(?:self_attn|mlp|block_sparse_moe)\."
    r".*(?:_proj|_proj_with_mqa|w[123])\.weight"
)


def fake_quantize(weights: NamedTensors, mode: FakeQuant) -> NamedTensors:
    """Yield the named tensors with rounded values. Names, shapes and dtypes stay.

    mode: the format. "bf16" rounds to the nearest value that an engine with --dtype bfloat16
        would hold. "fp8_blockwise" rounds linear layers to e4m3, with one float32 scale for each
        128 x 128 block of the whole matrix. "off" changes nothing.
    """
    for name, tensor in weights:
        if mode == "bf16":
            yield name, tensor.to(engine_dtype(name, torch.bfloat16)).to(tensor.dtype)
        elif mode == "fp8_blockwise" and is_linear(name):
            yield name, _round_to_fp8(tensor)
        else:
            yield name, tensor


def is_linear(name: str) -> bool:
    """True if the Hugging Face tensor of this name is a matrix that an FP8 engine quantizes."""
    return _LINEAR.fullmatch(name) is not None


def _round_to_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Quantize a matrix [M, N] to FP8 and return it in its own dtype."""
    # Other modes do not need the kernels, so that only this one loads them.
    from espo_kernels import quantize_fp8_blockwise

    fp8, scale_inv = quantize_fp8_blockwise(weight.float().contiguous(), block=_BLOCK)
    rows, columns = weight.shape
    scale_rows = scale_inv.repeat_interleave(_BLOCK, 0)[:rows]
    scale = scale_rows.repeat_interleave(_BLOCK, 1)[:, :columns]
    return (fp8.float() * scale).to(weight.dtype)
