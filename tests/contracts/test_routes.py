"""Routes are checked before they are replayed."""

import msgspec
import numpy as np
import pytest

from megatron_rl.contracts.routes import (
    RouteError,
    RouteShape,
    round_robin_routes,
    validate_routes,
    validate_stored_routes,
)

# Layer 0 has no experts, so the engine fills its routes with zeros.
WIRE = np.array([[[0, 0], [1, 2]], [[0, 0], [3, 0]]], dtype=np.int32)
SHAPE = RouteShape(moe_layers=(1,), num_hidden_layers=2, num_experts=4, topk=2)


def test_moe_layers_are_selected_and_narrowed() -> None:
    routes = validate_routes(WIRE, SHAPE, 2)
    np.testing.assert_array_equal(routes, [[[1, 2]], [[3, 0]]])
    assert routes.dtype == np.uint8
    assert (
        validate_routes(WIRE, msgspec.structs.replace(SHAPE, num_experts=257), 2).dtype == np.uint16
    )


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        (WIRE[:1], "routes_shape"),
        (WIRE[:, :1], "routes_shape"),
        (WIRE[..., :1], "routes_shape"),
        (WIRE + 1, "routes_range"),
        (WIRE - 4, "routes_range"),
        (np.where(WIRE == 2, 1, WIRE), "routes_duplicate"),
    ],
)
def test_invalid_routes_are_rejected_by_name(wire: np.ndarray, reason: str) -> None:
    with pytest.raises(RouteError) as error:
        validate_routes(wire.astype(np.int32), SHAPE, 2)
    assert error.value.reason == reason


STORED = np.array([[[1, 2]], [[3, 0]]], dtype=np.uint8)


def test_stored_routes_keep_their_values_and_get_the_narrow_dtype() -> None:
    np.testing.assert_array_equal(validate_stored_routes(STORED, SHAPE, 2), STORED)
    assert validate_stored_routes(STORED.astype(np.uint16), SHAPE, 2).dtype == np.uint8
    assert (
        validate_stored_routes(STORED, msgspec.structs.replace(SHAPE, num_experts=257), 2).dtype
        == np.uint16
    )


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        (STORED[:1], "routes_shape"),
        (STORED.repeat(2, axis=1), "routes_shape"),
        (STORED[..., :1], "routes_shape"),
        (STORED[:, 0], "routes_shape"),
        (STORED.astype(np.float32), "routes_shape"),
        (STORED + 1, "routes_range"),
        (STORED.astype(np.uint16) + 256, "routes_range"),
        (np.where(STORED == 2, 1, STORED), "routes_duplicate"),
    ],
)
def test_stored_routes_of_another_model_are_rejected(routes: np.ndarray, reason: str) -> None:
    with pytest.raises(RouteError) as error:
        validate_stored_routes(routes, SHAPE, 2)
    assert error.value.reason == reason


def test_repeated_experts_are_rejected_at_every_position() -> None:
    topk = 4
    shape = RouteShape(moe_layers=(0, 1, 2), num_hidden_layers=3, num_experts=8, topk=topk)
    wire = np.tile(np.arange(topk, dtype=np.int32), (5, 3, 1))
    np.testing.assert_array_equal(validate_routes(wire, shape, 5), wire)
    for position in np.ndindex(wire.shape):
        for other in set(range(topk)) - {position[-1]}:
            twice = wire.copy()
            twice[position] = other
            with pytest.raises(RouteError, match="twice"):
                validate_routes(twice, shape, 5)


def test_round_robin_is_valid_and_even() -> None:
    routes = round_robin_routes(12, 3, num_experts=8, topk=2)
    shape = RouteShape(moe_layers=(0, 1, 2), num_hidden_layers=3, num_experts=8, topk=2)
    np.testing.assert_array_equal(validate_routes(routes.astype(np.int32), shape, 12), routes)
    assert set(np.bincount(routes[:, 0].ravel(), minlength=8)) == {3}
