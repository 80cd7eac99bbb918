"""Per-layer metrics become heat maps in TensorBoard and in files."""

from pathlib import Path

import numpy as np

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records.heat_maps import heat_maps
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory

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


def test_tensorboard_has_the_heat_maps_and_no_curve_per_expert(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory(tmp_path)
    with MetricsLog(directory, LoggerSettings(tensorboard=True)) as log:
        for record in STEPS:
            values = {
                key: value for key, value in record.items() if key != "step" and value is not None
            }
            log.write(int(record["step"] or 0), values)
        log.write(5, {key: value or 0.0 for key, value in SHARES.items()})
    events = EventAccumulator(str(directory.tensorboard))
    events.Reload()
    assert events.Tags()["images"] == ["routes/disagreement", "routes/load"]
    assert [event.step for event in events.Images("routes/disagreement")] == [2, 4, 5]
    assert not any("expert" in name for name in events.Tags()["scalars"])
    assert "routes/disagreement/layer_3" in events.Tags()["scalars"]
