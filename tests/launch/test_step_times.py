"""`launch/step_times.py` says where a run's time went, and what is wrong with a directory that does
not tell.
"""

import json
from pathlib import Path
from types import ModuleType

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from tests.support.scripts import load_script, start_script

STEP = {
    "time/rollout": 2.0,
    "time/old_policy": 1.0,
    "time/train": 1.0,
    "time/step": 4.0,
    "time/reward_exposed": 0.002,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("step_times")


def write(directory: Path, *records: dict[str, float | None]) -> None:
    (directory / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in records)
    )


def test_later_steps_are_averaged_and_the_first_is_apart(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, last = (
        STEP | {"time/train": 9.0, "time/step": 12.0},
        STEP | {"time/rollout": 4.0, "time/step": 6.0},
    )
    write(tmp_path, {"step": 0, "time/eval": 3.0}, first, STEP, last | {"time/eval": 5.0})
    assert script.main([str(tmp_path)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert "| rollout | 2.00 | 3.00 | 60% |" in lines
    assert "| train | 9.00 | 1.00 | 20% |" in lines
    assert "| sync | 0.00 | 0.00 | 0% |" in lines
    assert "| whole step | 12.00 | 5.00 | |" in lines
    assert lines[-1] == "2 evaluations of 4.0 s each; reward time exposed 0.002 s a step"


def test_one_step_and_no_evaluation(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        tmp_path, STEP, {"step": 2, "time/rollout": 1.0, "time/train": None}
    )  # the second did not end
    assert script.main([str(tmp_path)]) == ExitCode.OK
    assert capsys.readouterr().out.endswith("| whole step | 4.00 | 4.00 | |\n")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "holds no metrics.jsonl"),
        ("", "no step is complete. Wait for the first one"),
        ('{"step": 0}\n', "no step is complete"),
        ('{"time/step": 0}\n', "no step is complete"),
        ('{"time/step": 1.0}\nnonsense\n{}\n', "metrics.jsonl line 2 is damaged"),
        ('{"time/step": "fast"}\n', "metrics.jsonl line 1 is damaged"),
    ],
)
def test_a_directory_that_does_not_tell_is_refused(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    content: str | None,
    told: str,
) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert script.main([str(tmp_path)]) == ExitCode.REFUSED
    output = capsys.readouterr()
    assert told in output.err and str(tmp_path) in output.err
    assert output.out == ""


def test_help_and_refusals_of_the_command(tmp_path: Path) -> None:
    helped = start_script("step_times", "--help", cwd=tmp_path)
    assert (helped.returncode, "runs/NAME" in helped.stdout) == (0, True)
    for arguments in ((), ("a", "b"), ("--runs", "a"), ("nowhere",)):
        done = start_script("step_times", *arguments, cwd=tmp_path)
        assert done.returncode == ExitCode.REFUSED
        assert done.stderr and "Traceback" not in done.stderr
    assert "nowhere: there is no such directory. Give a run's" in done.stderr
