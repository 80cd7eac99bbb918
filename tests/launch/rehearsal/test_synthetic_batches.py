"""Routes of rehearsals: valid, balanced or skewed."""

from typing import get_args

import numpy as np
import pytest

from launch.rehearsal.synthetic_batches import Routing, make_routes
from megatron_rl.models.families import read_shape
from tests.support.policies import TWO_DIGIT_ADDITION

SHAPE = read_shape(TWO_DIGIT_ADDITION)


def loads(routing: Routing) -> np.ndarray:
    routes = make_routes(4000, 2, SHAPE, routing, np.random.default_rng(0))
    return np.bincount(routes.ravel(), minlength=SHAPE.num_experts)


@pytest.mark.parametrize("routing", get_args(Routing))
def test_no_token_visits_an_expert_twice(routing: Routing) -> None:
    routes = make_routes(500, 3, SHAPE, routing, np.random.default_rng(0))
    assert routes.shape == (500, 3, SHAPE.topk) and routes.dtype == np.uint8
    columns = np.sort(routes, axis=-1)
    assert (columns[..., 1:] > columns[..., :-1]).all()
    assert routes.max() < SHAPE.num_experts


def test_balanced_routes_load_all_experts_alike() -> None:
    assert np.ptp(loads("balanced")) <= 1


@pytest.mark.parametrize("num_layers", [1, 2, 8, 12])
def test_balanced_routes_load_all_experts_of_each_layer_alike(num_layers: int) -> None:
    routes = make_routes(320, num_layers, SHAPE, "balanced", np.random.default_rng(0))
    for layer in range(num_layers):
        load = np.bincount(routes[:, layer].ravel(), minlength=SHAPE.num_experts)
        assert np.ptp(load) <= 1, layer


def test_skewed_routes_load_the_first_expert_most() -> None:
    load = loads("skewed")
    assert load[0] > 1.4 * load.mean()
    assert load[0] == load.max()
