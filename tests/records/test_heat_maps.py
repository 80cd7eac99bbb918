"""What was measured layer by layer becomes pictures: in TensorBoard, and by one command."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records.heat_maps import heat_maps
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory
from tests.support.scripts import load_script

STEPS: list[dict[str, float | None]] = [
    {"step": 0, "eval/accuracy": 0.1},
    {"step": 2, "routes/disagreement/layer_10": 0.2, "routes/disagreement/layer_3": 0.1},
    {"step": 3, "train/loss": 1.0},
    {"step": 4, "routes/disagreement/layer_10": None, "routes/disagreement/layer_3": 0.4},
]
SHARES: dict[str, float | None] = {
    f"routes/load/layer_3/expert_{e}": share for e, share in enumerate([0.5, 0.3, 0.2])
}


def test_maps_have_layers_as_rows_and_measured_steps_or_experts_as_columns() -> None:
    by_step, by_expert = heat_maps([*STEPS, {"step": 4, **SHARES}])
    assert (by_step.name, by_step.layers, by_step.columns) == (
        "routes/disagreement",
        [3, 10],
        [2, 4],
    )
    np.testing.assert_array_equal(by_step.values, [[0.1, 0.4], [0.2, np.nan]])
    assert (by_expert.name, by_expert.layers, by_expert.columns) == ("routes/load", [3], [0, 1, 2])
    assert by_expert.values.tolist() == [[0.5, 0.3, 0.2]]


def test_the_largest_value_is_the_brightest_and_a_missing_one_grey() -> None:
    by_step, *_ = heat_maps(STEPS)
    image = by_step.image()
    assert image.shape == (3, 24, 24) and image.dtype == np.uint8
    assert image[:, 0, 0].tolist() == [68, 1, 84] and image[:, 0, 12].tolist() == [253, 231, 37]
    assert image[:, 12, 12].tolist() == [128, 128, 128]
    assert next(heat_maps(STEPS[:2])).image().any(), "one column"


def test_tensorboard_has_the_maps_and_no_curve_for_each_expert(tmp_path: Path) -> None:
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


def test_one_command_draws_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps(record) for record in (*STEPS, {"step": 6, **SHARES})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert load_script("heat_maps").main([str(tmp_path)]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [file.name for file in files] == ["routes_disagreement.png", "routes_load.png"]
    assert all(Image.open(file).size > (300, 200) for file in files)


@pytest.mark.parametrize(
    ("text", "why"), [('{"step": 1}\n', "no step measured its routes"), (None, "metrics.jsonl")]
)
def test_a_run_without_measurements_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, why: str
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert load_script("heat_maps").main([str(tmp_path)]) == 2
    assert why in capsys.readouterr().err
