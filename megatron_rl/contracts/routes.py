"""Expert routes from the wire to what the trainer replays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Routes = npt.NDArray[np.uint8] | npt.NDArray[np.uint16]

_UINT8_EXPERTS = 256


class RouteError(ValueError):
    """Routes that cannot be replayed; `reason` is a short name that metrics count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def validate_routes(
    wire: npt.NDArray[np.int32], *, num_inputs: int, moe_layers: Sequence[int], num_experts: int, topk: int
) -> Routes:
    """Select the MoE layers of `wire` int32 [num_inputs, num_hidden_layers, topk] and check every entry.

    Returns uint8 (up to 256 experts) or uint16 [num_inputs, len(moe_layers), topk]. Raises `RouteError`.
    """
    if wire.ndim != 3 or wire.shape[0] != num_inputs or wire.shape[2] != topk or wire.shape[1] <= max(moe_layers):
        raise RouteError(
            "routes_shape",
            f"routes of shape {wire.shape}: expected {num_inputs} rows (one per input token), layers up to "
            f"{max(moe_layers)} and top-{topk}",
        )
    routes = wire[:, list(moe_layers)]
    if routes.size and (routes.min() < 0 or routes.max() >= num_experts):
        raise RouteError("routes_range", f"an expert id outside 0..{num_experts - 1}")
    ordered = np.sort(routes, axis=-1)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise RouteError("routes_duplicate", "an expert appears twice in one row")
    return _narrow(routes, num_experts)


def round_robin_routes(num_rows: int, num_layers: int, *, num_experts: int, topk: int) -> Routes:
    """Distinct valid experts for padding rows, spread evenly: [num_rows, num_layers, topk]."""
    rows = (np.arange(num_rows)[:, None] * topk + np.arange(topk)) % num_experts
    return _narrow(np.broadcast_to(rows[:, None], (num_rows, num_layers, topk)), num_experts)


def _narrow(routes: npt.NDArray[np.integer], num_experts: int) -> Routes:
    return routes.astype(np.uint8) if num_experts <= _UINT8_EXPERTS else routes.astype(np.uint16)
