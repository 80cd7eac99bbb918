"""`python -m tests.lab.run_time ahead`: what sampling ahead brings, and at most could."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from megatron_rl.records.past_run import RunUnreadable
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Lane, Timeline
from tests.lab.run_time import __main__ as command
from tests.lab.run_time import side_by_side
from tests.lab.run_time.measured_run import CannotFit
from tests.lab.run_time.measurement import PlannedRun, require_steps
from tests.lab.run_time.side_by_side import (
    BESIDE_FACTOR,
    Round,
    beside_seconds,
    measure_beside,
    measure_rounds,
    rounds_table,
    run_beside,
)
from tests.support.configurations import configuration_of

# Sampling needs 4 s alone and 6 s beside training, which needs 2 s and 3 s
ROUND = Round(
    step=6.5,
    sampling=4.0,
    training=2.0,
    rest=0.5,
    step_ahead=5.0,
    sampling_beside=6.0,
    training_beside=3.0,
)


def test_an_ideal_step_takes_as_long_as_the_slower_part() -> None:
    assert ROUND.speed_up == pytest.approx(1.3)
    assert ROUND.of_alone == pytest.approx((4.0 + 0.5) / 5.0)
    # When training is done after 3 s, half of the sampling is left: 2 s
    assert ROUND.of_beside == pytest.approx((3.0 + 2.0 + 0.5) / 5.0)


def test_either_part_may_be_the_slower_one() -> None:
    other = replace(ROUND, sampling=2.0, training=4.0, sampling_beside=3.0, training_beside=6.0)
    assert (other.of_alone, other.of_beside) == (ROUND.of_alone, ROUND.of_beside)


def test_table_has_a_row_for_each_round_and_means() -> None:
    lines = list(rounds_table([ROUND, ROUND]))
    assert lines[2] == (
        "| 0 | 6.50 | 4.00 | 2.00 | 0.50 | 5.00 | 1.30 x | 6.00 | 3.00 | 90% | 110% |"
    )
    assert len(lines) == 8
    assert lines[-3:] == [
        "Faster: 1.30 ± 0.00 x.",
        "Of the ideal speed: 90 ± 0 %.",
        "Of the speed of two programs: 110 ± 0 %.",
    ]
    assert list(rounds_table([ROUND]))[-1] == "Of the speed of two programs: 110 %."


def write_run(run: Path, times: Sequence[tuple[float, float]], *, is_training: bool) -> Path:
    """Write the timeline and the metrics of a run. times: start and end of each step."""
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    clock = [0.0]
    with Timeline(run / TIMELINE_FILE, print, lambda: clock[0]) as timeline:
        for step, (start, end) in enumerate(times, 1):
            clock[0] = end
            if is_training:
                timeline.add(Lane.RANKS, "train", end - start, step=step)
                timeline.add(Lane.RANKS, "sync", 0.1, step=step)
            else:
                timeline.add(Lane.ROLLOUTS, f"step-{step}-0", end - start, ago=0.1, step=step)
                timeline.add(Lane.ROLLOUTS, f"step-{step}-1", end - start - 0.1, step=step)
    records = [{"step": step, "time/credit": 0.25} for step in range(1, len(times) + 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return run


def test_steps_count_while_the_other_program_works(tmp_path: Path) -> None:
    """Steps 1 and 2 do not count, nor steps that begin before the other one or end after it."""
    sampling_times = [(0, 9), (9, 20), (20, 24), (24, 30), (80, 99)]
    training_times = [(0, 8), (8, 17), (19, 21), (22, 24), (25, 29), (40, 41)]
    sampling = write_run(tmp_path / "sampling", sampling_times, is_training=False)
    training = write_run(tmp_path / "training", training_times, is_training=True)
    seconds = beside_seconds(sampling, training)
    # A group begins 0.1 s before the step, and another one ends with it
    assert seconds[0] == pytest.approx(0.1 + (4 + 6) / 2)
    assert seconds[1] == pytest.approx(0.25 + (2 + 4 + 1) / 3)


def test_programs_that_never_overlap_are_refused(tmp_path: Path) -> None:
    sampling_times = [(step, step + 1) for step in range(4)]
    training_times = [(100 + step, 101 + step) for step in range(5)]
    sampling = write_run(tmp_path / "sampling", sampling_times, is_training=False)
    training = write_run(tmp_path / "training", training_times, is_training=True)
    with pytest.raises(CannotFit, match="never worked at the same time"):
        beside_seconds(sampling, training)


def script(text: str) -> list[str]:
    return [sys.executable, "-c", text]


@pytest.mark.slow
def test_the_second_program_starts_after_the_first_and_is_stopped(tmp_path: Path) -> None:
    """The second one writes whether the first one had begun, and the first one waits for that."""
    beginning = tmp_path / "beginning"
    answer = tmp_path / "answer"
    first = script(
        "import pathlib, time; time.sleep(0.5); "
        f"pathlib.Path({str(beginning)!r}).touch(); answer = pathlib.Path({str(answer)!r})\n"
        "while not answer.exists(): time.sleep(0.05)"
    )
    second = script(
        f"import os, pathlib, time; is_begun = os.path.exists({str(beginning)!r}); "
        f"pathlib.Path({str(answer)!r}).write_text(str(is_begun)); time.sleep(99)"
    )
    start = time.monotonic()
    run_beside(tmp_path, {"first": first, "second": second}, beginning.exists)
    assert answer.read_text() == "True"
    assert time.monotonic() - start < 60


@pytest.mark.slow
@pytest.mark.parametrize("failing", ["first", "second"])
def test_a_program_that_fails_is_an_error_and_stops_the_other(tmp_path: Path, failing: str) -> None:
    commands = {name: script("import time; time.sleep(99)") for name in ("first", "second")}
    commands[failing] = script("import sys; sys.exit(3)")
    start = time.monotonic()
    with pytest.raises(CannotFit, match="a program failed: see the logs in"):
        run_beside(tmp_path, commands, lambda: failing == "second")
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_a_program_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    stubborn = script(
        "import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"(pathlib.Path({str(tmp_path)!r}) / f'{{os.getpid()}}.pid').touch(); time.sleep(99)"
    )
    with pytest.raises(CannotFit, match="took longer than 8 s"):
        run_beside(
            tmp_path,
            {"first": stubborn, "second": stubborn},
            lambda: any(tmp_path.glob("*.pid")),
            limit=8.0,
            stop_seconds=0.2,
        )
    pids = [int(file.stem) for file in tmp_path.glob("*.pid")]
    assert len(pids) == 2 and not any(map(psutil.pid_exists, pids))


def test_a_run_with_another_number_of_steps_is_refused(tmp_path: Path) -> None:
    recording = write_run(tmp_path / "recording", [(0, 1)] * BESIDE_FACTOR * 6, is_training=False)
    require_steps(recording, BESIDE_FACTOR * 6)
    with pytest.raises(CannotFit, match=r"recording has 12 steps instead of 14\. Remove it"):
        measure_rounds(tmp_path, 1, 7, print)


def test_programs_of_which_none_is_complete_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path / "sampling-seed0", [(0, 1)] * 3, is_training=False)
    write_run(tmp_path / "training-seed0", [(0, 2)] * 5, is_training=True)
    with pytest.raises(CannotFit, match=r"neither .*sampling-seed0 nor .* has 24 steps"):
        measure_beside(tmp_path, 0, 12, print)


@pytest.mark.slow
def test_settings_of_the_programs_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[PlannedRun] = []
    (tmp_path / "recording").mkdir()

    def note(directory: Path, plan: PlannedRun, num_steps: int) -> list[str]:
        plans.append(plan)
        return []

    monkeypatch.setattr(side_by_side, "command_of", note)
    monkeypatch.setattr(side_by_side, "run_beside", lambda *arguments, **options: None)
    with pytest.raises(RunUnreadable, match="no such directory"):
        measure_beside(tmp_path, 0, 12, print)
    assert [plan.name for plan in plans] == ["sampling-seed0", "training-seed0"]
    for plan in plans:
        configuration_of(["experiment=quickstart", "parallel=single", *plan.settings])


@pytest.mark.parametrize("options", [["--rounds", "0"], ["--steps", "4"]])
def test_too_few_rounds_or_steps_are_refused(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command.main(["ahead", "--out", "runs/ahead", *options])
    assert "at least" in capsys.readouterr().err
