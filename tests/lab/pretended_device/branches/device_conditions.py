"""Tells what an expression says of the device, and what a condition is worth on a GPU."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TypeGuard

# Constants that stand for a GPU, and what stands for the CPU in their place. Triton compiles for
# GPUs alone.
GPU_CONSTANTS = frozenset({"cuda", "nccl", "triton"})
_HOST_CONSTANTS = frozenset({"cpu", "gloo"})
_GPU_NAMES = ("cuda", "nccl", "on_gpu")
_UNKNOWN_CALLS = ("get_device_capability", "device_count", "get_states")

LocalValues = Mapping[str, bool]  # the values of local variables on a GPU


def value_on_gpu(node: ast.expr, variables: LocalValues) -> bool | None:
    """The truth value on a GPU of a condition about the device; None if it is about other things.

    Parts about other things do not count: `is_cuda and size > 0` is true on a GPU.

    variables: what is known of local variables.
    """
    if isinstance(node, ast.BoolOp):
        return _combine(node, variables)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        value = value_on_gpu(node.operand, variables)
        return None if value is None else not value
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _compare(node.left, node.ops[0], node.comparators[0], variables)
    if isinstance(node, ast.Call):
        return _call(node)
    return _name(node, variables)


def is_gpu_test(node: ast.AST) -> TypeGuard[ast.expr]:
    """True for the kinds of expressions that ask for the device, wherever they stand."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("is_cuda", "is_cpu") and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.BoolOp | ast.Compare | ast.UnaryOp)


def is_gpu_constant(node: ast.AST) -> bool:
    """True for "cuda", "nccl" and "triton"."""
    return isinstance(node, ast.Constant) and node.value in GPU_CONSTANTS


def is_gpu_attribute(node: ast.AST) -> bool:
    """True for `torch.cuda.anything`, `tensor.cuda`, `Backend.NCCL` and `Activity.CUDA`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
        return False
    return node.attr in ("cuda", "NCCL", "CUDA") or is_torch_cuda(node.value)


def is_torch_cuda(node: ast.AST) -> bool:
    """True for the expression `torch.cuda`."""
    return ast.unparse(node) == "torch.cuda" if isinstance(node, ast.Attribute) else False


def _combine(node: ast.BoolOp, variables: LocalValues) -> bool | None:
    values = [value_on_gpu(part, variables) for part in node.values]
    known_values = [value for value in values if value is not None]
    if not known_values:
        return None
    return all(known_values) if isinstance(node.op, ast.And) else any(known_values)


def _compare(left: ast.expr, op: ast.cmpop, right: ast.expr, variables: LocalValues) -> bool | None:
    values = [value_on_gpu(side, variables) for side in (left, right)]
    is_same = isinstance(op, ast.Eq | ast.Is | ast.In)
    if not is_same and not isinstance(op, ast.NotEq | ast.IsNot | ast.NotIn):
        return None
    if None not in values:
        return (values[0] == values[1]) == is_same
    for side in (left, right):
        constants = _constants(side)
        if constants & GPU_CONSTANTS and constants & _HOST_CONSTANTS:
            return None
        if constants & GPU_CONSTANTS or _is_gpu_member(side):
            return is_same
        if constants & _HOST_CONSTANTS:
            return not is_same
    return None


def _constants(node: ast.expr) -> set[object]:
    """The constant, or the constants of a tuple."""
    if isinstance(node, ast.Constant):
        return {node.value}
    if isinstance(node, ast.Tuple):
        return {item.value for item in node.elts if isinstance(item, ast.Constant)}
    return set()


def _is_gpu_member(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ("NCCL", "CUDA")


def _call(node: ast.Call) -> bool | None:
    function = node.func
    if isinstance(function, ast.Attribute) and function.attr in _UNKNOWN_CALLS:
        return None
    if isinstance(function, ast.Attribute) and is_torch_cuda(function.value):
        return True
    names_gpu = any(_constants(argument) & GPU_CONSTANTS for argument in node.args)
    return True if names_gpu else None


def _name(node: ast.expr, variables: LocalValues) -> bool | None:
    if isinstance(node, ast.Name) and node.id in variables:
        return variables[node.id]
    name = {ast.Name: "id", ast.Attribute: "attr"}.get(type(node))
    text = getattr(node, name) if name else ""
    if text == "is_cpu":
        return False
    return True if any(word in text for word in _GPU_NAMES) else None
