"""Expert routes from the wire to what the trainer replays."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

_UINT8_EXPERTS = 256


class RouteShape(msgspec.Struct, frozen=True, kw_only=True):
    """What recorded routes must look like. moe_layers: 0-based decoder layers that have experts."""

    moe_layers: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    topk: int


class RouteError(ValueError):
    """Routes that cannot be replayed; `reason` is a short name that metrics count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def validate_routes(wire: npt.NDArray[np.int32], shape: RouteShape, num_inputs: int) -> Routes:
    """Select the MoE layers of `wire` int32 [num_inputs, num_hidden_layers, topk] and check every
    entry.

    Returns uint8 (up to 256 experts) or uint16 [num_inputs, len(moe_layers), topk]. Raises
    `RouteError`.
    """
    expected = (num_inputs, shape.num_hidden_layers, shape.topk)
    if wire.shape != expected:
        raise RouteError(
            "routes_shape",
            f"routes of shape {wire.shape}: expected {expected} (input tokens, decoder layers, top-k)",
        )
    every_layer = shape.moe_layers == tuple(range(shape.num_hidden_layers))
    return _checked(wire if every_layer else wire[:, list(shape.moe_layers)], shape)


def validate_stored_routes(
    kept: npt.NDArray[np.generic], shape: RouteShape, num_inputs: int
) -> Routes:
    """Check routes that come back from where they were kept, after `validate_routes`, perhaps for
    another model.

    Returns them as that does. Raises `RouteError`.
    """
    expected = (num_inputs, len(shape.moe_layers), shape.topk)
    if kept.shape != expected or not np.issubdtype(kept.dtype, np.integer):
        raise RouteError(
            "routes_shape",
            f"{kept.dtype} routes of shape {kept.shape}: expected integers {expected} (input tokens, layers with "
            "experts, top-k)",
        )
    return _checked(kept, shape)


def round_robin_routes(num_rows: int, num_layers: int, *, num_experts: int, topk: int) -> Routes:
    """Distinct valid experts for padding rows, spread evenly: [num_rows, num_layers, topk]."""
    rows = (np.arange(num_rows)[:, None] * topk + np.arange(topk)) % num_experts
    return _narrow(np.broadcast_to(rows[:, None], (num_rows, num_layers, topk)), num_experts)


def _checked(routes: npt.NDArray[Any], shape: RouteShape) -> Routes:
    """Raise `RouteError` where an expert is not there, or twice in a row; returns them narrow."""
    if routes.size and (routes.min() < 0 or routes.max() >= shape.num_experts):
        raise RouteError("routes_range", f"an expert id outside 0..{shape.num_experts - 1}")
    narrow = _narrow(routes, shape.num_experts)
    choices = np.ascontiguousarray(
        narrow.reshape(-1, shape.topk).T
    )  # pairs of long rows: ten times faster than a sort
    if any((one == other).any() for one, other in itertools.combinations(choices, 2)):
        raise RouteError("routes_duplicate", "an expert appears twice in one row")
    return narrow


def _narrow(routes: npt.NDArray[np.integer], num_experts: int) -> Routes:
    return routes.astype(np.uint8) if num_experts <= _UINT8_EXPERTS else routes.astype(np.uint16)
