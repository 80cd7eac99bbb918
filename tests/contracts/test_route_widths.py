"""Routes use one byte for each expert id where they fit."""

import numpy as np
import pytest

from megatron_rl.contracts.routes import round_robin_routes


@pytest.mark.parametrize(("experts", "dtype"), [(255, np.uint8), (256, np.uint8), (257, np.uint16)])
def test_ids_of_up_to_256_experts_fit_in_a_byte(experts: int, dtype: type) -> None:
    routes = round_robin_routes(experts, 1, num_experts=experts, topk=1)
    assert routes.dtype == dtype
    assert routes[:, 0, 0].tolist() == list(range(experts))
