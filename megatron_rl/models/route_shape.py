"""Shape of the routes that a model records."""

from __future__ import annotations

from megatron_rl.contracts.routes import RouteShape
from megatron_rl.models.shape import ModelShape


def route_shape(shape: ModelShape) -> RouteShape:
    """Return the shape of a model's routes."""
    return RouteShape(
        moe_layers=shape.moe_layers,
        num_hidden_layers=shape.num_layers,
        num_experts=shape.num_experts,
        topk=shape.topk,
    )
