"""Checks of expert routes before the trainer replays them."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

_UINT8_EXPERTS = 256


class RouteShape(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and range of valid routes.

    moe_layers: 0-based decoder layers that have experts.
    topk: number of experts that process a token.
    """

    moe_layers: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    topk: int


class RouteError(ValueError):
    """Routes that cannot be replayed.

    reason: short name by which metrics count the error.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def validate_routes(
    wire: npt.NDArray[np.integer[Any]], shape: RouteShape, num_inputs: int
) -> Routes:
    """Check routes of all layers, as an engine sends them, and select their MoE layers.

    wire: integers [num_inputs, num_hidden_layers, topk].

    Returns uint8 (up to 256 experts) or uint16 [num_inputs, len(moe_layers), topk].
    Raises `RouteError`.
    """
    expected_shape = (num_inputs, shape.num_hidden_layers, shape.topk)
    if wire.shape != expected_shape:
        raise RouteError(
            "routes_shape",
            f"routes of shape {wire.shape}: expected {expected_shape} "
            "(input tokens, decoder layers, top-k)",
        )
    has_experts_everywhere = shape.moe_layers == tuple(range(shape.num_hidden_layers))
    routes = wire if has_experts_everywhere else wire[:, list(shape.moe_layers)]
    return _check_experts(routes, shape)


def validate_stored_routes(
    routes: npt.NDArray[np.generic], shape: RouteShape, num_inputs: int
) -> Routes:
    """Check routes that were stored after `validate_routes`, perhaps for another model.

    routes: integers [num_inputs, len(moe_layers), topk].

    Returns the same as `validate_routes`. Raises `RouteError`.
    """
    require_stored_shape(routes, shape, num_inputs)
    return _check_experts(routes, shape)


def require_stored_shape(
    routes: npt.NDArray[np.generic], shape: RouteShape, num_inputs: int
) -> None:
    """Check the type and the shape of stored routes alone. Raises `RouteError`."""
    expected_shape = (num_inputs, len(shape.moe_layers), shape.topk)
    if routes.shape != expected_shape or not np.issubdtype(routes.dtype, np.integer):
        raise RouteError(
            "routes_shape",
            f"{routes.dtype} routes of shape {routes.shape}: expected integers {expected_shape} "
            "(input tokens, layers with experts, top-k)",
        )


def expand_routes(routes: Routes, shape: RouteShape) -> Routes:
    """Return stored routes with all layers, which `validate_routes` takes.

    routes: [num_inputs, len(moe_layers), topk]. Layers without experts have zeros.

    Returns [num_inputs, num_hidden_layers, topk] of the same type.
    """
    if len(shape.moe_layers) == shape.num_hidden_layers:
        return routes
    wire = np.zeros((len(routes), shape.num_hidden_layers, shape.topk), routes.dtype)
    wire[:, list(shape.moe_layers)] = routes
    return wire


def round_robin_routes(num_rows: int, num_layers: int, *, num_experts: int, topk: int) -> Routes:
    """Return distinct valid experts for padding rows, spread evenly: [num_rows, num_layers, topk].

    The dtype is as in `validate_routes`.
    """
    rows = (np.arange(num_rows)[:, None] * topk + np.arange(topk)) % num_experts
    return _narrow(np.broadcast_to(rows[:, None], (num_rows, num_layers, topk)), num_experts)


def _check_experts(routes: npt.NDArray[Any], shape: RouteShape) -> Routes:
    """Return routes in the narrow dtype. Raises `RouteError` for an invalid or repeated expert."""
    if routes.size and (routes.min() < 0 or routes.max() >= shape.num_experts):
        raise RouteError("routes_range", f"an expert id outside 0..{shape.num_experts - 1}")
    narrow = _narrow(routes, shape.num_experts)
    # Comparing pairs of long contiguous rows is ten times faster than sorting each short row.
    choices = np.ascontiguousarray(narrow.reshape(-1, shape.topk).T)
    if any((one == other).any() for one, other in itertools.combinations(choices, 2)):
        raise RouteError("routes_duplicate", "an expert appears twice in one row")
    return narrow


def _narrow(routes: npt.NDArray[np.integer], num_experts: int) -> Routes:
    if num_experts <= _UINT8_EXPERTS:
        return routes.astype(np.uint8, copy=False)
    return routes.astype(np.uint16, copy=False)
