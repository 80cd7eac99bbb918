"""The lines a person reads while a run goes on."""

import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.records.progress import (
    Progress,
    lost_rollouts,
    print_line,
    untrained_groups,
    what_trained,
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
}


def line(**values: float) -> str:
    stream = io.StringIO()
    Progress(10, enabled=True, stream=stream).step(
        3, STEP | {k.replace("__", "/"): v for k, v in values.items()}
    )
    return stream.getvalue()


def test_a_step_in_one_line() -> None:
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


def test_a_step_without_a_gradient_says_why_instead_of_nan() -> None:
    groups = {
        "rollout__groups__flat_wrong": 63.0,
        "rollout__groups__flat_right": 1.0,
        "rollout__groups__mixed": 0.0,
    }
    text = line(train__samples=0.0, **groups)
    assert "nothing trained: all 64 groups flat (63 wrong, 1 right)" in text
    assert "grad" not in text and "nan" not in text


def test_groups_that_cannot_train_for_other_reasons() -> None:
    few = {"rollout/groups/all_incorrect": 2.0, "rollout/groups/too_few_verdicts": 14.0}
    assert (
        untrained_groups(few)
        == "all 16 groups without a contrast (2 wrong, 14 with fewer than two verdicts)"
    )
    cut = {
        "rollout/groups/mixed": 3.0,
        "rollout/groups/all_incorrect": 1.0,
        "rollout/truncated": 1.0,
    }
    assert untrained_groups(cut) == (
        "4 groups (3 mixed ones without a token to train, 100% of all responses cut at rollout.max_new_tokens, 1 wrong)"
    )


def test_a_step_says_what_became_of_its_tokens() -> None:
    account = {
        "trained/mixed": 61.0,
        "zero_variance_dropped": 22.0,
        "probe_stopped": 9.0,
        "trained/tied": 5.0,
        "no_verdict": 3.0,
        "trained/flat": 0.0,
        "unaccounted": 0.0,
        "generated": 100.0,
    }
    text = line(**{f"account__{name}": n for name, n in account.items()})
    assert "| tokens: 61% mixed, 22% flat dropped, 9% probe stopped, 5% tied |" in text
    assert "tokens:" not in line()


def test_groups_with_ties_have_no_contrast_either() -> None:
    ties = {"rollout/groups/tied_correct": 2.0, "rollout/groups/tied_reward": 1.0}
    assert untrained_groups(ties) == "all 3 groups flat (2 tied right, 1 with equal rewards)"


def test_a_step_that_was_not_applied_says_so() -> None:
    assert what_trained({"train/samples": 8.0})[-1] == "no update: NaN or Inf"


def test_lost_rollouts_are_in_the_line_with_their_reasons() -> None:
    lost = {
        "rollout/samples": 1.0,
        "rollout/rejected": 511.0,
        "reward/no_verdict": 1.0,
        "rollout/rejected/routes": 2.0,
        "rollout/rejected/engine_failure": 509.0,
    }
    assert lost_rollouts(lost) == [
        "lost 511 of 512 rollouts (509 engine_failure, 2 routes)",
        "1 without a verdict",
    ]
    assert lost_rollouts({"rollout/rejected": 0.0}) == []


def test_what_takes_long_is_said_again_and_again() -> None:
    stream, deadline = io.StringIO(), time.monotonic() + 10
    with Progress(1, enabled=True, stream=stream).during("loading the model", every_seconds=0.02):
        while stream.getvalue().count("loading the model: ") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    said = stream.getvalue()
    assert "] loading the model: 0 s so far\n" in said and said.count("loading the model: ") >= 2
    time.sleep(0.1)
    assert stream.getvalue() == said


def test_nothing_is_said_to_be_under_way_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reminder may be about to speak when the work ends."""
    about_to_speak, said = threading.Event(), list[str]()

    def slowly(progress: Progress, text: str) -> None:
        about_to_speak.set()
        time.sleep(0.2)
        said.append(text)

    monkeypatch.setattr(Progress, "say", slowly)
    with Progress(1, enabled=True).during("loading the model", every_seconds=0.01):
        assert about_to_speak.wait(10)
    assert said


def test_a_reader_that_leaves_does_not_end_the_run() -> None:
    """`python launch/train_rl.py ...

    | head -1`: the rest of the lines go nowhere, and the exit code is the run's.
    """
    script = (
        "from megatron_rl.records.progress import Progress\nimport time, sys\n"
        "progress = Progress(1, enabled=True)\n"
        "for i in range(200):\n    progress.say(f'line {i}'); time.sleep(0.002)\n"
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_standard_output_does_not_end_the_run() -> None:
    with open("/dev/full", "w") as full:
        assert print_line("x", full) is False
        assert print_line("x", full) is True  # it goes to /dev/null by now
