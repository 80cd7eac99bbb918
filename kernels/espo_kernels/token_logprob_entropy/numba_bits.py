"""Logits as raw bits for compiled loops.

numpy has no bfloat16, and numba no 16-bit floats on CPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def as_bits(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's own memory, flat, as the integer type that names its float format."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.uint16}[
        tensor.dtype
    ]
    return tensor.detach().view(bits).numpy().reshape(-1)


@intrinsic
def load(typing_context: Any, bits: Any) -> Any:
    """float32 from the bits of one logit."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if bits == types.int32:
            return builder.bitcast(args[0], ir.FloatType())
        if bits == types.int16:
            high = builder.shl(
                builder.zext(args[0], ir.IntType(32)), ir.Constant(ir.IntType(32), 16)
            )
            return builder.bitcast(high, ir.FloatType())
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(bits), generate


@intrinsic
def store(typing_context: Any, value: Any, like: Any) -> Any:
    """The bits of a float32 in the format that `like` names."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        if like == types.int32:
            return builder.bitcast(args[0], ir.IntType(32))
        if like == types.int16:
            return _round_to_bfloat16(builder, args[0])
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return like(types.float32, like), generate


@intrinsic
def nearest_integer(typing_context: Any, value: Any) -> Any:
    """The nearest integer as float32.

    numba's own rounding calls a library and does not vectorise.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        rint = builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()])
        return builder.call(rint, [args[0]])

    return types.float32(types.float32), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line of array[index] into the second-level cache."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        data = context.make_array(array)(context, builder, args[0]).data
        pointer = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [args[1]]), pointer)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        read, second_level, of_data = (ir.Constant(word, number) for number in (0, 2, 1))
        builder.call(function, [address, read, second_level, of_data])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def prefer_wide_vectors(typing_context: Any) -> Any:
    """Let the calling function use 512-bit vectors. By default, LLVM prefers 256 bits."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        # llvmlite accepts only the attributes it knows by name, and this one is a string attribute.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def power_of_two(typing_context: Any, exponent: Any) -> Any:
    """2^n as float32 for an int32 n in [-126, 127]."""

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        word = ir.IntType(32)
        biased_exponent = builder.add(args[0], ir.Constant(word, 127))
        return builder.bitcast(builder.shl(biased_exponent, ir.Constant(word, 23)), ir.FloatType())

    return types.float32(types.int32), generate


@intrinsic
def to_ordered(typing_context: Any, value: Any) -> Any:
    """An int32 that compares as the float32 does (positive NaN above +inf).

    `from_ordered` is its inverse.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _flip_negative(builder, builder.bitcast(args[0], ir.IntType(32)))

    return types.int32(types.float32), generate


@intrinsic
def from_ordered(typing_context: Any, key: Any) -> Any:
    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(_flip_negative(builder, args[0]), ir.FloatType())

    return types.float32(types.int32), generate


def _flip_negative(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    word = ir.IntType(32)
    sign = builder.ashr(bits, ir.Constant(word, 31))
    return builder.xor(bits, builder.and_(sign, ir.Constant(word, 0x7FFFFFFF)))


def _round_to_bfloat16(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    word = ir.IntType(32)
    half = ir.IntType(16)
    bits = builder.bitcast(value, word)
    odd = builder.and_(builder.lshr(bits, ir.Constant(word, 16)), ir.Constant(word, 1))
    rounded_bits = builder.lshr(
        builder.add(builder.add(bits, ir.Constant(word, 0x7FFF)), odd), ir.Constant(word, 16)
    )
    is_nan = builder.fcmp_unordered(
        "uno", value, value
    )  # adding to a NaN's bits could wrap it into a number
    return builder.select(is_nan, ir.Constant(half, 0x7FC0), builder.trunc(rounded_bits, half))
