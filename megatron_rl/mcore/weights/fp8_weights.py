"""Quantizes the stream of weights as FP8 engines hold them.

A weight [M, N] becomes e4m3 codes [M, N] and float32 scales [⌈M/128⌉, ⌈N/128⌉], one for each block
of 128 x 128. Codes times scales are the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from megatron_rl.config.schema import EngineSettings
from megatron_rl.mcore.weights.export import NamedTensors
from megatron_rl.models.fp8_weights import Fp8Weights, fp8_weights
from megatron_rl.models.shape import ModelShape
from sglang_bridge.block_fp8 import BLOCK, SCALE_SUFFIX
from sglang_bridge.weights.fused_layout import engine_dtype


def fp8_weights_of(engine: EngineSettings, shape: ModelShape) -> Fp8Weights | None:
    """List which tensors the engines of a run hold in FP8, None for unquantized engines."""
    if engine.quantization is None:
        return None
    return fp8_weights(
        shape,
        unquantized_first=engine.unquantized_first_layers,
        unquantized_last=engine.unquantized_last_layers,
    )


def quantize_weights(weights: NamedTensors, names: Fp8Weights) -> NamedTensors:
    """Yield scales, then codes, of each quantized weight, and other tensors unchanged.

    One tensor is quantized at a time, on its device.

    weights: whole tensors under Hugging Face names, all of a model or a part, in any order.

    Raises `ValueError` for a name that the model does not have, and for a weight that is no matrix
    of floating-point numbers. On CPUs also for NaN and Inf.
    """
    # Only quantized engines need the kernels
    from espo_kernels import quantize_fp8_blockwise

    for name, tensor in weights:
        if name in names.others:
            yield name, tensor
            continue
        if name not in names.matrices:
            raise ValueError(f"weight {name}: the model has no tensor of this name")
        try:
            codes, scales = quantize_fp8_blockwise(_matrix(tensor), block=BLOCK)
        except (TypeError, ValueError) as error:
            raise ValueError(f"weight {name}: {error}") from error
        yield name + SCALE_SUFFIX, scales
        yield name, codes


def check_part(weights: NamedTensors, names: Fp8Weights, dtype: torch.dtype) -> NamedTensors:
    """Pass on a part of what FP8 engines get. They would convert other dtypes silently.

    dtype: the engines' dtype, of tensors that are not quantized.

    Raises `ValueError` for a tensor that comes twice, or that has another name, dtype or shape than
    expected.
    """
    yield from _without_other_tensors(weights, names, dict(_expected_dtypes(names, dtype)))


def complete(weights: NamedTensors, names: Fp8Weights, dtype: torch.dtype) -> NamedTensors:
    """Pass on what FP8 engines get of a whole model, and check that it is neither more nor less.

    See `check_part`. After the last tensor, it raises `ValueError` for those that are missing.
    """
    missing = dict(_expected_dtypes(names, dtype))
    yield from _without_other_tensors(weights, names, missing)
    if missing:
        first_names = ", ".join(list(missing)[:8])
        more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
        raise ValueError(f"the weights sent are incomplete: {first_names}{more} did not come")


def _without_other_tensors(
    weights: NamedTensors, names: Fp8Weights, missing: dict[str, torch.dtype]
) -> NamedTensors:
    """Pass on tensors that are missing, and take them from `missing`."""
    scale_shapes: dict[str, torch.Size] = {}
    for name, tensor in weights:
        expected_dtype = missing.pop(name, None)
        if expected_dtype is None:
            raise ValueError(f"weight {name}: it comes twice, or the model has no tensor like it")
        if tensor.dtype != expected_dtype:
            raise ValueError(
                f"weight {name}: its dtype is {tensor.dtype} instead of {expected_dtype}"
            )
        if name.endswith(SCALE_SUFFIX):
            scale_shapes[name.removesuffix(SCALE_SUFFIX)] = tensor.shape
        elif name in names.matrices:
            _require_scales(name, tensor, scale_shapes.pop(name, None))
        yield name, tensor


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 2:
        raise ValueError(f"its shape is {tuple(tensor.shape)}, and only matrices have blocks")
    return tensor.detach().contiguous()


def _require_scales(name: str, codes: torch.Tensor, scales: torch.Size | None) -> None:
    shape = tuple(-(-size // BLOCK) for size in codes.shape)
    if scales is None or tuple(scales) != shape:
        problem = (
            "none came before it" if scales is None else f"they have the shape {tuple(scales)}"
        )
        raise ValueError(f"weight {name}: its scales must have the shape {shape}, and {problem}")


def _expected_dtypes(names: Fp8Weights, dtype: torch.dtype) -> Iterator[tuple[str, torch.dtype]]:
    all_names: Iterable[str] = sorted(names.matrices | names.others)
    for name in all_names:
        if name in names.matrices:
            yield name, torch.float8_e4m3fn
            yield name + SCALE_SUFFIX, torch.float32
        else:
            yield name, engine_dtype(name, dtype)
