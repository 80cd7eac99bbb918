"""Per-layer metrics become heat maps."""

import itertools

import numpy as np

from megatron_rl.records.heat_maps import HeatMap, HeatMaps, heat_maps

STEPS: list[dict[str, float | None]] = [
    {"step": 0, "eval/accuracy": 0.1},
    {"step": 2, "routes/disagreement/layer_10": 0.2, "routes/disagreement/layer_3": 0.1},
    {"step": 3, "train/loss": 1.0},
    {"step": 4, "routes/disagreement/layer_10": None, "routes/disagreement/layer_3": 0.4},
]
SHARES: dict[str, float | None] = {
    f"routes/load/layer_3/expert_{e}": share for e, share in enumerate([0.5, 0.3, 0.2])
}


def test_rows_are_layers_and_columns_are_steps_or_experts() -> None:
    by_step, by_expert = heat_maps([*STEPS, {"step": 4, **SHARES}])
    assert (by_step.name, by_step.layers, by_step.columns) == (
        "routes/disagreement",
        [3, 10],
        [2, 4],
    )
    np.testing.assert_array_equal(by_step.values, [[0.1, 0.4], [0.2, np.nan]])
    assert (by_expert.name, by_expert.layers, by_expert.columns) == ("routes/load", [3], [0, 1, 2])
    assert by_expert.values.tolist() == [[0.5, 0.3, 0.2]]


def test_the_largest_value_is_the_brightest_and_missing_ones_are_grey() -> None:
    by_step, *_ = heat_maps(STEPS)
    image = by_step.image()
    assert image.shape == (3, 24, 24) and image.dtype == np.uint8
    assert image[:, 0, 0].tolist() == [68, 1, 84] and image[:, 0, 12].tolist() == [253, 231, 37]
    assert image[:, 12, 12].tolist() == [128, 128, 128]
    assert next(heat_maps(STEPS[:2])).image().any(), "one column"


def test_maps_without_a_difference_have_a_scale_of_their_own() -> None:
    """Zero everywhere is the good case, and dark like every small value."""
    zero = HeatMap("routes/disagreement", [0, 1], [5], np.zeros((2, 1)))
    assert zero.limits == (0.0, 1.0) and zero.image()[:, 0, 0].tolist() == [68, 1, 84]
    constant = HeatMap("routes/load_imbalance", [0], [5, 6], np.full((1, 2), 2.0))
    assert constant.limits == (0.0, 2.0)
    missing = HeatMap("routes/disagreement", [0], [5], np.full((1, 1), np.nan))
    assert missing.limits == (0.0, 1.0)
    assert HeatMap("routes/load", [0], [0, 1], np.array([[0.3, 0.7]])).limits == (0.3, 0.7)


def test_a_map_of_many_steps_keeps_some_of_them_at_equal_distances() -> None:
    maps = HeatMaps(max_columns=8)
    for step in range(10, 1010, 10):
        maps.add({"step": step, "routes/disagreement/layer_0": float(step)})
    (by_step,) = maps.maps()
    assert 4 <= len(by_step.columns) <= 9
    *regular, newest = by_step.columns
    assert by_step.columns[0] == 10 and newest == 1000
    distances = {after - before for before, after in itertools.pairwise(regular)}
    assert len(distances) == 1
    assert by_step.values.tolist() == [[float(step) for step in by_step.columns]]
