"""Answers for casts to FP8 in the layouts of Transformer Engine, in plain torch.

A quantized matrix [M, K] has two copies: row-wise for products that add along K, and column-wise
for products that add along M. Their scales are

- `Float8CurrentScaling`: one for the matrix
- `Float8BlockScaling`: one for 128 values along the sum, or for 128 x 128 values of a weight
- `MXFP8`: one power of two for 32 values along the sum
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_BLOCK = 128
_MX_BLOCK = 32
_MX_BIAS = 127


def quantize(
    tensor: torch.Tensor, quantizer: Any, output: Any = None, noop: torch.Tensor | None = None
) -> Any:
    """Cast a matrix or a batch of rows as a quantizer says. Returns its kind of tensor.

    Raises ValueError for sizes that the compiled matrix products refuse.
    """
    if noop is not None and noop.item():
        return output
    _require_sizes(tensor, quantizer)
    if output is None:
        output = create_empty_quantized_tensor(
            quantizer, tensor.shape, tensor.dtype, tensor.device, pin_memory=False
        )
    rows = tensor.detach().reshape(-1, tensor.shape[-1]).float()
    kind = type(quantizer).__name__
    if kind == "Float8CurrentScalingQuantizer":
        _fill_tensorwise(output, rows, quantizer)
    elif kind == "Float8BlockQuantizer":
        _fill_blockwise(output, rows, quantizer)
    elif kind == "MXFP8Quantizer":
        _fill_mxfp8(output, rows, quantizer)
    else:
        raise NotImplementedError(f"casts of {kind}")
    return output


def create_empty_quantized_tensor(
    quantizer: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    pin_memory: bool,
) -> Any:
    """Allocate the copies that a quantizer's usage asks for. Returns its kind of tensor."""
    from transformer_engine.pytorch import tensor as kinds

    rowwise = quantizer.rowwise_usage
    columnwise = quantizer.columnwise_usage
    columns = quantizer.get_columnwise_shape(shape)
    copies = {
        "rowwise_data": torch.empty(shape, dtype=torch.uint8) if rowwise else None,
        "columnwise_data": torch.empty(columns, dtype=torch.uint8) if columnwise else None,
    }
    options = {
        "shape": shape,
        "dtype": dtype,
        "fp8_dtype": quantizer.dtype,
        "quantizer": quantizer,
    }
    kind = type(quantizer).__name__
    if kind == "Float8CurrentScalingQuantizer":
        row, column = copies.values()
        scale = torch.empty(1)
        return kinds.Float8Tensor(data=row, data_transpose=column, fp8_scale_inv=scale, **options)
    scale_dtype = torch.uint8 if kind == "MXFP8Quantizer" else torch.float32
    options |= copies | {
        name: torch.empty(quantizer.get_scale_shape(shape, is_columnwise), dtype=scale_dtype)
        if is_used
        else None
        for name, is_columnwise, is_used in (
            ("rowwise_scale_inv", False, rowwise),
            ("columnwise_scale_inv", True, columnwise),
        )
    }
    if kind == "MXFP8Quantizer":
        return kinds.MXFP8Tensor(with_gemm_swizzled_scales=False, **options)
    if kind == "Float8BlockQuantizer":
        is_square = quantizer.block_scaling_dim == 2
        return kinds.Float8BlockwiseQTensor(is_2D_scaled=is_square, **options)
    raise NotImplementedError(f"tensors of {kind}")


def split_quantize(
    tensor: torch.Tensor,
    split_sections: Sequence[int],
    quantizer_list: Sequence[Any],
    disable_bulk_allocation: bool = False,
) -> list[Any]:
    """Cast each group of rows with its quantizer."""
    parts = tensor.split(list(split_sections))
    return [quantize(part, one) for part, one in zip(parts, quantizer_list, strict=True)]


def bgrad_quantize(input: torch.Tensor, quantizer: Any) -> list[Any]:
    """Return the sum over rows and the cast rows."""
    gradient = input.reshape(-1, input.shape[-1]).float().sum(0).to(input.dtype)
    return [gradient, quantize(input, quantizer)]


def fp8_transpose(input: torch.Tensor, dtype: Any, *, out: torch.Tensor | None) -> torch.Tensor:
    """Transpose bytes [M, K] to [K, M]."""
    transpose = input.reshape(-1, input.shape[-1]).T.contiguous()
    return transpose if out is None else out.copy_(transpose)


def dequantize(input: Any, otype: Any) -> torch.Tensor:
    """Return the values of a quantized tensor in a dtype."""
    return operand(input, is_rowwise=True).reshape(input.shape).to(torch_dtype(otype))


def operand(tensor: Any, *, is_rowwise: bool) -> torch.Tensor:
    """Return the matrix that a product reads: float32 [M, K] from the copy for its sum.

    Raises ValueError if that copy was not made, which the compiled product would read too.
    """
    if not hasattr(tensor, "_quantizer"):
        values: torch.Tensor = tensor
        return values.reshape(-1, values.shape[-1])
    kind = type(tensor).__name__
    if kind.startswith("Float8Tensor"):
        return _read_tensorwise(tensor)
    data = tensor._rowwise_data if is_rowwise else tensor._columnwise_data
    scales = tensor._rowwise_scale_inv if is_rowwise else tensor._columnwise_scale_inv
    if data is None:
        raise ValueError(f"{kind} has no {'row' if is_rowwise else 'column'}-wise copy")
    values = data.view(torch_dtype(tensor._fp8_dtype)).float()
    if kind.startswith("MXFP8"):
        return _read_mxfp8(values.reshape(-1, values.shape[-1]), scales, is_rowwise=is_rowwise)
    return _read_blockwise(tensor, values, scales, is_rowwise=is_rowwise)


def torch_dtype(te_dtype: Any) -> torch.dtype:
    """Convert a dtype of the extension."""
    names = {
        "kFloat32": torch.float32,
        "kBFloat16": torch.bfloat16,
        "kFloat16": torch.float16,
        "kFloat8E4M3": torch.float8_e4m3fn,
        "kFloat8E5M2": torch.float8_e5m2,
        "kInt32": torch.int32,
        "kByte": torch.uint8,
    }
    return names[te_dtype.name]


def _fill_tensorwise(output: Any, rows: torch.Tensor, quantizer: Any) -> None:
    dtype = torch_dtype(quantizer.dtype)
    largest = rows.abs().max() if rows.numel() else torch.zeros(())
    if quantizer.with_amax_reduction:  # ranks that share a matrix share its scale
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    scale = largest.clamp(min=1e-12) / torch.finfo(dtype).max
    values = (rows / scale).to(dtype).view(torch.uint8)
    output._scale_inv.fill_(float(scale))
    if output._data is not None:
        output._data.copy_(values.reshape(output._data.shape))
    if output._transpose is not None:
        output._transpose.copy_(values.T.reshape(output._transpose.shape))
        output._transpose_invalid = False


def _read_tensorwise(tensor: Any) -> torch.Tensor:
    dtype = torch_dtype(tensor._fp8_dtype)
    if tensor._data is not None:
        values = tensor._data.view(dtype).float()
        return values.reshape(-1, values.shape[-1]) * tensor._scale_inv
    if tensor._transpose is None or tensor._transpose_invalid:
        raise ValueError("Float8Tensor has neither its data nor a transpose")
    values = tensor._transpose.view(dtype).float()
    return values.reshape(len(values), -1).T * tensor._scale_inv


def _fill_blockwise(output: Any, rows: torch.Tensor, quantizer: Any) -> None:
    is_square = quantizer.block_scaling_dim == 2
    for data, scales, matrix in (
        (output._rowwise_data, output._rowwise_scale_inv, rows),
        (output._columnwise_data, output._columnwise_scale_inv, rows.T),
    ):
        if data is None:
            continue
        dtype = torch_dtype(quantizer.dtype)
        largest = block_maxima(matrix, _BLOCK if is_square else 1, _BLOCK)
        scale = largest.clamp(min=1e-12) / torch.finfo(dtype).max
        divisors = spread(scale, matrix.shape, _BLOCK if is_square else 1, _BLOCK)
        data.copy_((matrix / divisors).to(dtype).view(torch.uint8).reshape(data.shape))
        stored_scales = scale if is_square else scale.T
        scales.zero_()
        scales[: stored_scales.shape[0], : stored_scales.shape[1]] = stored_scales


def _read_blockwise(
    tensor: Any, values: torch.Tensor, scales: torch.Tensor, *, is_rowwise: bool
) -> torch.Tensor:
    # The column-wise copy is transposed: [K, M].
    matrix = values.reshape(-1, values.shape[-1]) if is_rowwise else values.flatten(1)
    height = _BLOCK if tensor._is_2D_scaled else 1
    tall = -(-matrix.shape[0] // height)
    wide = -(-matrix.shape[1] // _BLOCK)
    scale = scales[:tall, :wide] if tensor._is_2D_scaled else scales[:wide, :tall].T
    matrix = matrix * spread(scale, matrix.shape, height, _BLOCK)
    return matrix if is_rowwise else matrix.T


def _fill_mxfp8(output: Any, rows: torch.Tensor, quantizer: Any) -> None:
    dtype = torch_dtype(quantizer.dtype)
    for data, scales, matrix, is_rowwise in (
        (output._rowwise_data, output._rowwise_scale_inv, rows, True),
        (output._columnwise_data, output._columnwise_scale_inv, rows.T, False),
    ):
        if data is None:
            continue
        largest = block_maxima(matrix, 1, _MX_BLOCK).clamp(min=1e-30)
        exponent = (largest / torch.finfo(dtype).max).log2().ceil()
        values = matrix / spread(exponent.exp2(), matrix.shape, 1, _MX_BLOCK)
        stored_scales = exponent + _MX_BIAS
        values, stored_scales = (
            (values, stored_scales) if is_rowwise else (values.T, stored_scales.T)
        )
        data.copy_(values.to(dtype).contiguous().view(torch.uint8).reshape(data.shape))
        scales.zero_()
        scales[: stored_scales.shape[0], : stored_scales.shape[1]] = stored_scales.to(torch.uint8)


def _read_mxfp8(matrix: torch.Tensor, scales: torch.Tensor, *, is_rowwise: bool) -> torch.Tensor:
    matrix = matrix if is_rowwise else matrix.T
    stored_scales = scales if is_rowwise else scales.T
    stored_scales = stored_scales[: matrix.shape[0], : matrix.shape[1] // _MX_BLOCK]
    exponent = stored_scales.float() - _MX_BIAS
    matrix = matrix * spread(exponent.exp2(), matrix.shape, 1, _MX_BLOCK)
    return matrix if is_rowwise else matrix.T


def block_maxima(matrix: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """The largest absolute value of each block, [ceil(M / height), ceil(K / width)]."""
    rows, columns = matrix.shape
    pad = (0, -columns % width, 0, -rows % height)
    whole = torch.nn.functional.pad(matrix.abs(), pad)
    blocks = whole.reshape(whole.shape[0] // height, height, whole.shape[1] // width, width)
    return blocks.amax((1, 3))


def spread(scale: torch.Tensor, shape: Sequence[int], height: int, width: int) -> torch.Tensor:
    """Repeat the scale of each block for its values."""
    values = scale.repeat_interleave(height, 0).repeat_interleave(width, 1)
    return values[: shape[0], : shape[1]]


def _require_sizes(tensor: torch.Tensor, quantizer: Any) -> None:
    rows = tensor.numel() // tensor.shape[-1]
    multiple = _MX_BLOCK if type(quantizer).__name__ == "MXFP8Quantizer" else 16
    if rows % multiple or tensor.shape[-1] % multiple:
        raise ValueError(
            f"{type(quantizer).__name__}: {rows} rows of {tensor.shape[-1]}, but products in FP8 "
            f"take multiples of {multiple}"
        )
