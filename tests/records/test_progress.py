"""The progress lines of a run."""

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron_rl.records.progress import (
    Progress,
    describe_losses,
    describe_untrained_groups,
    describe_update,
    print_line,
)

ROOT = Path(__file__).resolve().parents[2]
STEP = {
    "rollout/tokens": 640.0,
    "time/rollout": 2.0,
    "time/step": 4.0,
    "time/train": 1.5,
    "reward/mean": 0.25,
    "rollout/samples": 512.0,
    "rollout/rejected": 0.0,
    "rollout/zero_variance_rate": 0.5,
    "policy/entropy": 1.25,
    "train/grad_norm": 0.75,
    "train/samples": 256.0,
    "train/nonfinite": 0.0,
}


SUPERVISED_STEP = {
    "rollout/tokens": 0.0,
    "rollout/samples": 256.0,
    "rollout/zero_variance_rate": 0.0,
    "account/demonstrated": 2048.0,
    "account/generated": 0.0,
    "time/rollout": 0.5,
    "time/step": 4.0,
    "time/train": 1.5,
    "reward/mean": 1.0,
    "policy/nll": 1.875,
    "train/grad_norm": 0.75,
    "train/samples": 256.0,
    "train/nonfinite": 0.0,
}


def line_of(values: Mapping[str, float], *, is_sampled: bool = True) -> str:
    stream = io.StringIO()
    Progress(10, is_enabled=True, stream=stream).log_step(3, values, is_sampled=is_sampled)
    return stream.getvalue()


def line(**values: float) -> str:
    return line_of(STEP | {k.replace("__", "/"): v for k, v in values.items()})


def test_a_step_is_one_line() -> None:
    text = line()
    for part in (
        "step 3/10",
        "reward 0.25",
        "640 tokens at 320/s",
        "zero-variance 50%",
        "entropy 1.250",
        "grad 0.75",
    ):
        assert part in text
    assert "lost" not in text and "verdict" not in text and text.count("\n") == 1


class Terminal(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


DETAILED_STEP = STEP | {
    "account/generated": 640.0,
    "account/trained/mixed": 320.0,
    "account/all_incorrect": 200.0,
    "account/all_correct": 120.0,
    "time/old_policy": 0.5,
    "time/sync": 0.25,
    "time/record": 0.125,
}


@pytest.mark.parametrize(
    ("columns", "end"),
    [
        (240, "(rollout 2.0 old_policy 0.5 train 1.5 sync 0.2 record 0.1)"),
        (180, "| tokens: 50% mixed, 31% all incorrect, 19% all correct | 4.0 s"),
        (120, "| 640 tokens at 320/s | zero-variance 50% | entropy 1.250 | grad 0.75 | 4.0 s"),
        (100, "| reward 0.25 | zero-variance 50% | entropy 1.250 | grad 0.75 | 4.0 s"),
        (80, "step 3/10 | reward 0.25 | zero-variance 50% | entropy 1.250 | 4.0 s"),
        (64, "step 3/10 | reward 0.25 | zero-variance 50% | 4.0 s"),
    ],
)
def test_a_step_line_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: int, end: str
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    Progress(10, is_enabled=True, stream=stream).log_step(3, DETAILED_STEP)
    text = stream.getvalue().removesuffix("\n")
    assert text.endswith(end) and len(text) <= columns


def test_a_step_line_in_a_file_has_all_details(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    text = line_of(DETAILED_STEP)
    assert "tokens at 320/s" in text and "19% all correct" in text and "record 0.1)" in text


def test_losses_stay_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    lost = {"rollout/rejected": 3.0, "rollout/rejected/engine_failed": 3.0}
    Progress(10, is_enabled=True, stream=stream).log_step(3, DETAILED_STEP | lost)
    assert "| lost 3 of 515 rollouts (3 engine_failed) |" in stream.getvalue()


def test_a_supervised_step_shows_its_loss_and_demonstrations() -> None:
    text = line_of(SUPERVISED_STEP)
    assert text.endswith(
        "] step 3/10 | 2048 tokens of demonstrations | nll 1.875 | grad 0.75 | "
        "4.0 s (rollout 0.5 train 1.5)\n"
    )
    text = line_of({**SUPERVISED_STEP, "train/nonfinite": 1.0, "account/demonstrated": 0.0})
    assert "| 0 tokens of demonstrations | nll 1.875 | no update: NaN or Inf |" in text


def test_recorded_rollouts_were_not_sampled_in_the_step() -> None:
    text = line_of(STEP, is_sampled=False)
    assert "| 640 recorded tokens |" in text and "tokens at" not in text


def test_a_step_shows_the_metrics_of_its_loss_alone() -> None:
    values = {name: value for name, value in STEP.items() if name != "policy/entropy"}
    assert "| zero-variance 50% | nll 0.500 | grad 0.75 |" in line_of(values | {"policy/nll": 0.5})
    assert "| zero-variance 50% | grad 0.75 |" in line_of(values)


def test_a_step_whose_probes_were_all_stopped_says_so() -> None:
    groups = {f"rollout__groups__{kind}": 0.0 for kind in ("mixed", "all_correct", "all_incorrect")}
    assert "nothing trained: the selection stopped all probes |" in line(
        train__samples=0.0, **groups
    )


def test_a_step_without_an_update_gives_the_reason_instead_of_nan() -> None:
    groups = {
        "rollout__groups__all_incorrect": 63.0,
        "rollout__groups__all_correct": 1.0,
        "rollout__groups__mixed": 0.0,
    }
    text = line(train__samples=0.0, **groups)
    assert (
        "nothing trained: all 64 groups have zero variance (63 all incorrect, 1 all correct)"
        in text
    )
    assert "grad" not in text and "nan" not in text


def test_groups_that_cannot_train_for_other_reasons() -> None:
    few = {"rollout/groups/all_incorrect": 2.0, "rollout/groups/too_few_verdicts": 14.0}
    assert describe_untrained_groups(few) == (
        "all 16 groups have no learning signal (2 all incorrect, 14 with fewer than two verdicts)"
    )
    cut = {
        "rollout/groups/mixed": 3.0,
        "rollout/groups/all_incorrect": 1.0,
        "rollout/truncated": 1.0,
    }
    assert describe_untrained_groups(cut) == (
        "4 groups (3 mixed without a trainable token, "
        "100% of all responses cut at rollout.max_new_tokens, 1 all incorrect)"
    )


def test_the_step_line_shows_the_largest_classes_of_tokens() -> None:
    account = {
        "trained/mixed": 61.0,
        "zero_variance_dropped": 22.0,
        "probe_stopped": 9.0,
        "trained/tied": 5.0,
        "no_verdict": 3.0,
        "trained/zero_variance": 0.0,
        "unaccounted": 0.0,
        "unfinished": 8850.0,  # of later steps
        "generated": 100.0,
        "engine_tokens": 100.0,
    }
    text = line(**{f"account__{name}": n for name, n in account.items()})
    assert "| tokens: 61% mixed, 22% zero variance dropped, 9% probe stopped, 5% tied |" in text
    assert "tokens:" not in line()


def test_tied_groups_have_zero_variance_too() -> None:
    ties = {"rollout/groups/tied_correct": 2.0, "rollout/groups/tied_reward": 1.0}
    assert describe_untrained_groups(ties) == (
        "all 3 groups have zero variance (2 tied correct, 1 with equal rewards)"
    )


def test_a_step_that_was_not_applied_is_marked() -> None:
    assert (
        describe_update({"train/samples": 8.0, "train/nonfinite": 1.0})[-1]
        == "no update: NaN or Inf"
    )


def test_rejected_rollouts_are_in_the_line_with_their_reasons() -> None:
    values = {
        "rollout/samples": 1.0,
        "rollout/rejected": 511.0,
        "reward/no_verdict": 1.0,
        "rollout/rejected/routes": 2.0,
        "rollout/rejected/engine_failure": 509.0,
    }
    assert describe_losses(values) == [
        "lost 511 of 512 rollouts (509 engine_failure, 2 routes)",
        "1 without a verdict",
    ]
    assert describe_losses({"rollout/rejected": 0.0}) == []


def test_a_long_task_is_logged_repeatedly() -> None:
    stream = io.StringIO()
    deadline = time.monotonic() + 10
    with Progress(1, is_enabled=True, stream=stream).task("loading the model", first_seconds=0.02):
        while stream.getvalue().count("loading the model: ") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    text = stream.getvalue()
    assert "] loading the model: 0 s so far\n" in text
    assert text.count("loading the model: ") >= 2
    time.sleep(0.2)
    assert stream.getvalue() == text


def test_no_reminder_is_logged_after_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reminder may begin just before the task ends."""
    is_logging = threading.Event()
    lines: list[str] = []

    def log_slowly(progress: Progress, text: str) -> None:
        is_logging.set()
        time.sleep(0.2)
        lines.append(text)

    monkeypatch.setattr(Progress, "log", log_slowly)
    with Progress(1, is_enabled=True).task("loading the model", first_seconds=0.01):
        assert is_logging.wait(10)
    assert lines


def test_a_closed_pipe_does_not_end_the_run() -> None:
    """With `| head -1`, the other lines go nowhere, and the exit code is the run's."""
    script = (
        "from megatron_rl.records.progress import Progress\nimport time, sys\n"
        "progress = Progress(1, is_enabled=True)\n"
        "for i in range(200):\n    progress.log(f'line {i}'); time.sleep(0.002)\n"
        "sys.exit(5)\n"
    )
    read, write = os.pipe()
    job = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=write, stderr=subprocess.PIPE, text=True
    )
    os.close(write)
    assert b"line 0" in os.read(read, 100)
    os.close(read)
    _, errors = job.communicate(timeout=60)
    assert (job.returncode, errors) == (5, "")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
def test_no_line_is_lost_in_another_encoding(encoding: str) -> None:
    script = (
        "from megatron_rl.records.progress import Progress, print_line\n"
        "progress = Progress(1, is_enabled=True)\n"
        "progress.log('accuracy 0.5 \\xb1 0.1 \\u2192 0.8'); progress.log('\\ud800 \\u6e2c')\n"
        "print_line('done')\n"
    )
    job = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        timeout=60,
    )
    lines = job.stdout.decode(encoding).splitlines()
    assert [line.partition("] ")[2] or line for line in lines] == [
        text.encode(encoding, "backslashreplace").decode(encoding)
        for text in ("accuracy 0.5 \xb1 0.1 \u2192 0.8", "\ud800 \u6e2c", "done")
    ]
    assert (job.returncode, job.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output_does_not_end_the_run() -> None:
    with open("/dev/full", "w") as full:
        assert print_line("x", full) is False
        assert print_line("x", full) is True  # the stream is /dev/null by now


def test_a_step_that_only_records_has_no_update_to_report() -> None:
    recording = {name: value for name, value in STEP.items() if "train/" not in name}
    recording.pop("policy/entropy")
    recording |= {"account/recorded": 608.0, "account/rejected/version": 32.0}
    text = line_of(recording | {"account/generated": 640.0, "time/record": 0.25})
    assert text.endswith(
        "] step 3/10 | reward 0.25 | 640 tokens at 320/s | zero-variance 50% | "
        "tokens: 95% recorded, 5% rejected/version | 4.0 s (rollout 2.0 train 1.5 record 0.2)\n"
    )
