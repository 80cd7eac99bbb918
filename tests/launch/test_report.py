"""`launch/report.py` prints step times, draws heat maps and refuses directories without them."""

import json
from pathlib import Path

import pytest
from PIL import Image

from launch import report
from megatron_rl.contracts.exit_codes import ExitCode
from tests.support.scripts import start_script

STEP = {
    "time/rollout": 2.0,
    "time/old_policy": 1.0,
    "time/train": 1.0,
    "time/step": 4.0,
    "time/reward_exposed": 0.002,
}
MEASURED_STEPS: list[dict[str, float | None]] = [
    {"step": 0, "eval/accuracy": 0.1},
    {"step": 2, "routes/disagreement/layer_10": 0.2, "routes/disagreement/layer_3": 0.1},
    {"step": 4, "routes/disagreement/layer_10": None, "routes/disagreement/layer_3": 0.4},
    {"step": 6, "routes/load/layer_3/expert_0": 0.7, "routes/load/layer_3/expert_1": 0.3},
]


def write_metrics(directory: Path, *records: dict[str, float | None]) -> None:
    lines = [json.dumps(record) + "\n" for record in records]
    (directory / "metrics.jsonl").write_text("".join(lines))


def test_later_steps_are_averaged_and_the_first_is_separate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = STEP | {"time/train": 9.0, "time/step": 12.0}
    last = STEP | {"time/rollout": 4.0, "time/step": 6.0}
    start = {"step": 0, "time/eval": 1.0, "time/eval/hard": 2.0}
    write_metrics(tmp_path, start, first, STEP, last | {"time/eval/hard": 5.0})
    assert report.main(["steps", str(tmp_path)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert "| rollout | 2.00 | 3.00 | 60% |" in lines
    assert "| train | 9.00 | 1.00 | 20% |" in lines
    assert "| sync | 0.00 | 0.00 | 0% |" in lines
    assert "| other | 0.00 | 0.00 | 0% |" in lines
    assert "| whole step | 12.00 | 5.00 | |" in lines
    assert lines[-3:] == [
        "3 steps: 22.0 s; reward time exposed 0.002 s a step",
        "2 evaluations: 8.0 s, 4.0 s each",
        "together: 30.0 s",
    ]


def test_the_table_holds_all_time_of_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of 6 seconds are in no section. The checkpoint of a step is in the next record."""
    step = STEP | {"time/credit": 0.25, "time/account": 0.125, "time/step": 6.0}
    second = step | {"time/measure_replay": 0.625, "time/step": 6.625}
    write_metrics(tmp_path, step, second, step | {"time/checkpoint": 1.5})
    assert report.main(["steps", str(tmp_path)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert "| credit | 0.25 | 0.25 | 4% |" in lines
    assert "| measure_replay | 0.00 | 0.31 | 5% |" in lines
    assert "| account | 0.12 | 0.12 | 2% |" in lines
    assert "| other | 1.62 | 1.62 | 26% |" in lines
    assert "| whole step | 6.00 | 6.31 | |" in lines
    assert lines[-2:] == ["1 checkpoint: 1.5 s", "together: 20.1 s"]
    sections = [line.split("|")[1].strip() for line in lines if line.startswith("|")]
    assert "record" not in sections


def test_one_complete_step_without_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    incomplete = {"step": 2, "time/rollout": 1.0, "time/train": None}
    write_metrics(tmp_path, STEP, incomplete)
    assert report.main(["steps", str(tmp_path)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert "| whole step | 4.00 | 4.00 | |" in lines
    assert lines[-1] == "1 step: 4.0 s; reward time exposed 0.002 s a step"


@pytest.mark.slow
def test_heat_maps_are_png_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_metrics(tmp_path, *MEASURED_STEPS)
    assert report.main(["heat-maps", str(tmp_path)]) == ExitCode.OK
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [file.name for file in files] == ["routes_disagreement.png", "routes_load.png"]
    assert all(Image.open(file).size > (300, 200) for file in files)


@pytest.mark.parametrize(
    ("command", "content", "reason"),
    [
        ("steps", None, "holds no metrics.jsonl"),
        ("steps", "", "no step is complete"),
        ("steps", '{"step": 0}\n', "no step is complete"),
        ("steps", '{"time/step": 0}\n', "no step is complete"),
        ("steps", '{"time/step": 1.0}\nnonsense\n{}\n', "metrics.jsonl line 2"),
        ("steps", '{"time/step": "fast"}\n', "metrics.jsonl line 1"),
        ("heat-maps", None, "metrics.jsonl"),
        ("heat-maps", '{"step": 1}\n', "no step measured its routes"),
    ],
)
def test_a_directory_without_measurements_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    content: str | None,
    reason: str,
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert report.main([command, str(tmp_path)]) == ExitCode.REFUSED
    output = capsys.readouterr()
    assert reason in output.err and str(tmp_path) in output.err
    assert output.out == ""


@pytest.mark.slow
def test_the_script_prints_help_and_refusals(tmp_path: Path) -> None:
    result = start_script("report", "heat-maps", "--help", cwd=tmp_path)
    assert result.returncode == ExitCode.OK
    assert "python launch/report.py" in result.stdout and "Output" in result.stdout
    result = start_script("report", "steps", "nowhere", cwd=tmp_path)
    assert result.returncode == ExitCode.REFUSED
    assert "nowhere: there is no such directory" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("--help",), ("steps", "--help"), ("heat-maps", "--help")])
def test_help_of_every_command(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as end:
        report.main([*arguments])
    assert end.value.code in (None, ExitCode.OK)
    text = capsys.readouterr().out
    assert "report.py" in text and "Output" in text


@pytest.mark.parametrize("arguments", [(), ("steps",), ("steps", "a", "b"), ("maps", "a")])
def test_wrong_arguments_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    try:
        code: object = report.main([*arguments])
    except SystemExit as end:
        code = end.code
    assert code == ExitCode.REFUSED
    assert capsys.readouterr().err
