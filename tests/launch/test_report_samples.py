"""`launch/report.py samples` as a user starts it."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from launch import report
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.exit_record import write_exit_record
from megatron_rl.records.reminder import Reminder
from megatron_rl.records.samples import show
from megatron_rl.records.samples.sample import SampleKind
from tests.support.past_runs import write_run
from tests.support.samples import make_sample, write_step
from tests.support.scripts import LAUNCH

SHORTEST = (SampleKind.SHORTEST,)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A running run with samples of steps 1 and 10."""
    path = write_run([f"run.root={tmp_path}", "run.name=job", "experiment=smoke"], code=None)
    write_step(path, 1, [make_sample("first", step=1, kinds=SHORTEST)])
    samples = [
        make_sample("surest", group=0, kinds=(SampleKind.SUREST_INCORRECT,)),
        make_sample("longest", group=1, kinds=(SampleKind.LONGEST, SampleKind.MOST_CLIPPED)),
        make_sample("other", group=1, sample_index=1),
        make_sample("short", group=2, kinds=SHORTEST),
    ]
    write_step(path, 10, samples)
    return path


def texts(output: str) -> list[str]:
    """The responses in the output."""
    lines = output.splitlines()
    return [
        lines[index + 1].removeprefix("│ ")
        for index, line in enumerate(lines)
        if line.startswith("response (")
    ]


@pytest.mark.parametrize(
    ("options", "responses"),
    [
        ([], ["short", "longest", "surest"]),
        (["--step", "1"], ["first"]),
        (["--kind", "most-clipped"], ["longest"]),
        (["--kind", "highest-mismatch"], []),
        (["--kind", "all"], ["surest", "longest", "other", "short"]),
    ],
)
def test_the_newest_step_is_shown_by_kind(
    run: Path, capsys: pytest.CaptureFixture[str], options: list[str], responses: list[str]
) -> None:
    assert report.main(["samples", str(run), *options]) == ExitCode.OK
    assert texts(capsys.readouterr().out) == responses


def test_json_prints_one_object_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["samples", str(run), "--json"]) == ExitCode.OK
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(o["text"], o["step"]) for o in objects] == [
        ("short", 10),
        ("longest", 10),
        ("surest", 10),
    ]


@pytest.mark.parametrize("case", ["missing", "no run", "no samples", "step", "damaged"])
def test_what_cannot_be_shown_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    arguments = [str(run)]
    match case:
        case "missing":
            arguments = [str(tmp_path / "nothing")]
            reason = "is not the directory of a run. Give one, such as runs/NAME"
        case "no run":
            arguments = [str(tmp_path)]
            reason = "is not the directory of a run"
        case "no samples":
            for file in (run / "samples").iterdir():
                file.unlink()
            reason = "has no samples yet (samples.every=10)"
        case "step":
            arguments += ["--step", "7"]
            reason = "has no samples of step 7. It has samples of 1, 10"
        case "damaged":
            (run / "samples/step-0000010.parquet").write_bytes(b"PAR1")
            reason = "step-0000010.parquet cannot be read"
    assert report.main(["samples", *arguments]) == ExitCode.REFUSED
    output = capsys.readouterr()
    assert reason in output.err and output.out == ""


@contextmanager
def start(run: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, str(LAUNCH / "report.py"), "samples", str(run), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        yield process
        process.kill()


def lines_until(process: subprocess.Popen[str], last: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip())
        if last in line:
            break
    return lines


@pytest.mark.slow
def test_following_shows_new_steps_until_the_run_ends(run: Path) -> None:
    """A step that a resumed run trains again is new. Ctrl-C has nothing left to interrupt."""
    with start(run, "--follow", "--kind", "shortest") as process:
        assert "│ short" in lines_until(process, "short\n")
        write_step(run, 20, [make_sample("new", step=20, kinds=SHORTEST)])
        assert "│ new" in lines_until(process, "│ new")
        write_step(run, 20, [make_sample("again", step=20, kinds=SHORTEST)])
        assert "│ again" in lines_until(process, "│ again")
        write_exit_record(run, 0, "the run is complete")
        assert process.wait(timeout=60) == ExitCode.OK
        assert process.stderr is not None and process.stderr.read() == ""


@pytest.mark.slow
def test_ctrl_c_and_a_closed_pipe_end_without_a_traceback(run: Path) -> None:
    with start(run, "--follow", "--kind", "shortest") as process:
        lines_until(process, "short\n")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == ExitCode.INTERRUPTED
        assert process.stderr is not None and process.stderr.read() == ""
    write_step(
        run, 30, [make_sample("x" * 99, step=30, group=g, kinds=SHORTEST) for g in range(999)]
    )
    with start(run, "--step", "30", "--full") as process:
        lines_until(process, "response")
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(timeout=60) == ExitCode.OK
        assert process.stderr.read() == ""


ENCODINGS = ("ascii", "latin-1", "cp1252", "shift_jis")
OPTIONS = ("--step=30", "--json", "--full")
TYPICAL = {
    ("ascii", "--step=30"),
    ("latin-1", "--json"),
    ("cp1252", "--full"),
    ("shift_jis", "--full"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("encoding", "option"),
    [
        pytest.param(*case, marks=() if case in TYPICAL else pytest.mark.nightly)
        for case in itertools.product(ENCODINGS, OPTIONS)
    ],
)
def test_other_encodings_show_every_character(
    run: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, option: str
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", encoding)
    write_step(run, 30, [make_sample("\u6e2c\u2192\xb1\U0001f600", step=30, kinds=SHORTEST)])
    job = subprocess.run(
        [sys.executable, str(LAUNCH / "report.py"), "samples", str(run), option],
        capture_output=True,
        encoding=encoding,
        timeout=60,
    )
    assert (job.returncode, job.stderr) == (ExitCode.OK, "")
    assert "1f600" in job.stdout or "ude00" in job.stdout


@pytest.mark.slow
def test_a_long_wait_says_so(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(show, "Reminder", lambda: Reminder(0.0))
    assert report.main(["samples", str(run), "--follow"]) == ExitCode.INTERRUPTED
    output = capsys.readouterr()
    assert output.err.splitlines()[0] == (
        f"waiting for new samples of {run} for 0 s (samples.every=10)"
    )
    assert texts(output.out) == ["short", "longest", "surest"]


def test_following_a_step_ends_with_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["samples", str(run), "--follow", "--step", "1"]) == ExitCode.OK
    assert texts(capsys.readouterr().out) == ["first"]
    write_exit_record(run, 0, "the run is complete")
    assert report.main(["samples", str(run), "--follow", "--step", "7"]) == ExitCode.REFUSED
    assert "has no samples of step 7" in capsys.readouterr().err


def test_help_names_every_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main(["samples", "--help"])
    text = capsys.readouterr().out
    assert all(kind in text for kind in SampleKind) and os.sep + "report.py" in text
