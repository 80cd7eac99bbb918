"""Per-layer metrics become heat maps in TensorBoard and in files."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records import metrics_log
from megatron_rl.records.heat_maps import HeatMap, HeatMaps, heat_maps
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


def test_earlier_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run reads those of its first part. It does not read its own."""
    images: list[list[int]] = []
    num_reads = 0
    read = metrics_log.iterate_metrics

    def count_reads(directory: Path) -> object:
        nonlocal num_reads
        num_reads += 1
        return read(directory)

    def note_columns(heat_map: HeatMap) -> np.ndarray:
        images.append(heat_map.columns)
        return np.zeros((3, 1, 1), np.uint8)

    monkeypatch.setattr(metrics_log, "iterate_metrics", count_reads)
    monkeypatch.setattr(HeatMap, "image", note_columns)
    directory = RunDirectory(tmp_path)
    for steps in ([2, 4], [6, 8]):
        with MetricsLog(directory, LoggerSettings(tensorboard=True)) as log:
            for step in steps:
                log.write(step, {"routes/disagreement/layer_0": 0.5})
    assert num_reads == 2
    assert images == [[2], [2, 4], [2, 4, 6], [2, 4, 6, 8]]


def test_a_damaged_earlier_record_costs_the_earlier_columns(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.metrics_file.write_text('{"step": 1, "routes/disagreement/layer_0": 1}\nno JSON\n')
    with MetricsLog(directory, LoggerSettings(tensorboard=True)) as log:
        log.write(3, {"routes/disagreement/layer_0": 0.5})
        log.write(4, {"routes/disagreement/layer_0": 0.5})
    assert log._maps is not None
    assert [heat_map.columns for heat_map in log._maps.maps()] == [[1, 3, 4]]


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
