"""Metrics and heat maps in TensorBoard."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron_rl.records.heat_maps import HeatMap
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.run.features.tensorboard import tensorboard
from megatron_rl.run.features.tensorboard.tensorboard import TensorBoard

STEPS: list[dict[str, float | None]] = [
    {"step": 0, "eval/accuracy": 0.1},
    {"step": 2, "routes/disagreement/layer_10": 0.2, "routes/disagreement/layer_3": 0.1},
    {"step": 3, "train/loss": 1.0},
    {"step": 4, "routes/disagreement/layer_10": None, "routes/disagreement/layer_3": 0.4},
]
SHARES: dict[str, float | None] = {
    f"routes/load/layer_3/expert_{e}": share for e, share in enumerate([0.5, 0.3, 0.2])
}


@contextlib.contextmanager
def tensorboard_of(directory: RunDirectory) -> Iterator[MetricsLog]:
    """Return a log whose records TensorBoard gets."""
    with MetricsLog(directory) as log, contextlib.closing(TensorBoard(directory)) as writer:
        log.add_reader(writer.write)
        yield log


def test_earlier_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run reads the records of its first part, and not its own."""
    images: list[list[int]] = []
    num_reads = 0
    read = tensorboard.iterate_metrics

    def count_reads(directory: Path) -> object:
        nonlocal num_reads
        num_reads += 1
        return read(directory)

    def note_columns(heat_map: HeatMap) -> np.ndarray:
        images.append(heat_map.columns)
        return np.zeros((3, 1, 1), np.uint8)

    monkeypatch.setattr(tensorboard, "iterate_metrics", count_reads)
    monkeypatch.setattr(HeatMap, "image", note_columns)
    directory = RunDirectory(tmp_path)
    for steps in ([2, 4], [6, 8]):
        with tensorboard_of(directory) as log:
            for step in steps:
                log.write(step, {"routes/disagreement/layer_0": 0.5})
    assert num_reads == 2
    assert images == [[2], [2, 4], [2, 4, 6], [2, 4, 6, 8]]


def test_a_damaged_earlier_record_costs_the_earlier_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images: list[list[int]] = []

    def note_columns(heat_map: HeatMap) -> np.ndarray:
        images.append(heat_map.columns)
        return np.zeros((3, 1, 1), np.uint8)

    monkeypatch.setattr(HeatMap, "image", note_columns)
    directory = RunDirectory(tmp_path)
    directory.metrics_file.write_text('{"step": 1, "routes/disagreement/layer_0": 1}\nno JSON\n')
    with tensorboard_of(directory) as log:
        log.write(3, {"routes/disagreement/layer_0": 0.5})
        log.write(4, {"routes/disagreement/layer_0": 0.5})
    assert images == [[1, 3], [1, 3, 4]]


def test_tensorboard_has_the_heat_maps_and_no_curve_per_expert(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    directory = RunDirectory(tmp_path)
    with tensorboard_of(directory) as log:
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
