"""Makes Triton's interpreter compute in bfloat16, and spares it the search for fast kernels.

The interpreter keeps bfloat16 values as their bits in 16-bit integers, computes with these
integers, and cuts bits off where a GPU rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.autotuner import Autotuner

_LOWER_HALF = 16
_HANDLE: Any = interpreter.TensorHandle


def patch_interpreter() -> None:
    """Change the interpreter of this process."""
    autotuner: Any = Autotuner
    autotuner._bench = lambda *_, **__: [0.0, 0.0, 0.0]  # there is no GPU to time
    builder: Any = interpreter.InterpreterBuilder
    builder.binary_op = _binary(builder.binary_op)
    builder.unary_op = _unary(builder.unary_op)
    builder.cast_impl = _cast(builder.cast_impl)


def _binary(original: Any) -> Any:
    def compute(self: Any, left: Any, right: Any, op: Any) -> Any:
        if left.dtype.scalar != tl.bfloat16:
            return original(self, left, right, op)
        output = op(widen(left.data), widen(right.data))
        if output.dtype == np.bool_:
            return _HANDLE(output, tl.int1)
        return _HANDLE(round_to_bfloat16(output), tl.bfloat16)

    return compute


def _unary(original: Any) -> Any:
    def compute(self: Any, value: Any, op: Any) -> Any:
        if value.dtype.scalar != tl.bfloat16:
            return original(self, value, op)
        return _HANDLE(round_to_bfloat16(op(widen(value.data))), tl.bfloat16)

    return compute


def _cast(original: Any) -> Any:
    def convert(self: Any, source: Any, dtype: Any) -> Any:
        if (source.dtype.scalar, dtype.scalar) == (tl.float32, tl.bfloat16):
            return _HANDLE(round_to_bfloat16(source.data), tl.bfloat16)
        return original(self, source, dtype)

    return convert


def widen(bits: np.ndarray) -> np.ndarray:
    """Return the values of bfloat16 bits as float32."""
    values: np.ndarray = (bits.astype(np.uint32) << _LOWER_HALF).view(np.float32)
    return values


def round_to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16 values, ties to even, uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    last_bit = (bits >> _LOWER_HALF) & 1
    nearest: np.ndarray = ((bits + 0x7FFF + last_bit) >> _LOWER_HALF).astype(np.uint16)
    return nearest
