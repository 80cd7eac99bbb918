"""Scorers that block, fork, eat memory or end their process cost their own call, not the run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.rewards.runner import LOST
from tests.rollouts.user_process.classes import (
    Results,
    is_running,
    pids_in,
    score_in_process,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
NAME = "tests.lab.user_processes.hostile:Hostile"
TIMEOUT_SECONDS = 2.0
GRACE_SECONDS = 1.5
# To the verdict of a call that loses two processes, on a machine that does other things too
SECONDS = 40.0
IGNORED = "timeout: the scorer ignored its cancellation"
Score = Callable[..., Results]


def nightly(*values: str) -> Any:
    """Return values of a test that is long."""
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture(autouse=True)
def pid_file(tmp_path: Path) -> Path:
    """Returns the file that lists the processes of the class and those that it starts."""
    return tmp_path / "pids"


@pytest.fixture
def score(tmp_path: Path) -> Score:
    """Scores these texts at the same time, with a hostile scorer."""
    return partial(score_in_process, NAME, options={"folder": str(tmp_path)}, grace_s=GRACE_SECONDS)


def processes_of(file: Path) -> int:
    """Return how many processes have run calls or were started. None is left."""
    pids = set(pids_in(file))
    assert [pid for pid in pids if is_running(pid)] == []
    return len(pids)


@pytest.mark.parametrize(
    "text",
    [
        nightly("blocks"),
        nightly("blocks_in_a_task"),
        nightly("stops"),
    ],
)
def test_a_call_that_answers_nothing_is_ended_twice_and_others_are_made_again(
    text: str, pid_file: Path, score: Score
) -> None:
    results = score(text, "waits", timeout_s=TIMEOUT_SECONDS)
    assert "its process was ended: it answered nothing for " in results.reason(text)
    assert results.verdicts["waits"].reward == 1.0 and results.verdicts["after"].reward == 1.0
    assert 2 * (TIMEOUT_SECONDS + GRACE_SECONDS) <= results.seconds < SECONDS
    assert len(results.warnings) == 2
    assert f"(call {text!r}; number 1)" in results.warnings[0]
    assert processes_of(pid_file) == 3


@pytest.mark.nightly
def test_calls_that_ignore_their_cancellation_cost_no_other(pid_file: Path, score: Score) -> None:
    results = score("swallows 1", "swallows 2", "waits", "swallows 3")
    assert {results.reason(f"swallows {number}") for number in (1, 2, 3)} == {IGNORED}
    assert results.verdicts["waits"].reward == 1.0
    assert [text[-9:] for text in results.warnings] == ["number 1)", "number 2)"]
    assert results.seconds < SECONDS and processes_of(pid_file) == 2


def test_no_forked_process_is_left_even_if_it_ignores_sigterm(pid_file: Path, score: Score) -> None:
    results = score("forks")
    assert results.reason("forks") == IGNORED
    assert results.verdicts["after"].reward == 1.0
    # Two processes of the class, two children, and a daemon with its parent
    assert processes_of(pid_file) == 6


@pytest.mark.nightly
def test_a_fork_that_returns_into_the_event_loop_ends(score: Score) -> None:
    results = score("forks_and_returns", timeout_s=10.0)
    assert results.verdicts["forks_and_returns"].reward == 70.0  # the exit code of the copy
    assert results.warnings == []


@pytest.mark.parametrize(
    ("text", "reason", "beginning"),
    [
        ("exits", "exit code 3", "ChildProcessError: "),
        nightly("exits_in_a_thread", "exit code 4", LOST),
        nightly("closes", "it closed its connection", LOST),
        nightly("writes", "it sent an invalid message", LOST),
        ("kills_its_supervisor", "SIGKILL", LOST),
    ],
)
def test_a_process_that_ends_costs_the_call_that_ended_it(
    text: str, reason: str, beginning: str, pid_file: Path, score: Score
) -> None:
    results = score(text, "after", timeout_s=10.0, then=("waits",))
    assert reason in results.reason(text)
    assert results.reason(text).startswith(beginning)
    assert results.verdicts["after"].reward == 1.0 and results.verdicts["waits"].reward == 1.0
    assert processes_of(pid_file) == 3


def test_exits_of_the_interpreter_cost_a_call_and_not_the_process(
    pid_file: Path, score: Score
) -> None:
    texts = ("raises_system_exit", "raises_interrupt")
    results = score(*texts, "returns_an_object", "returns_a_lie", "waits", timeout_s=10.0)
    assert results.reason("raises_system_exit").endswith("RuntimeError: it called sys.exit(3)")
    assert "KeyboardInterrupt" in results.reason("raises_interrupt")
    assert "returned object, not a Verdict" in results.reason("returns_an_object")
    assert "Expected `float | null`, got `str`" in results.reason("returns_a_lie")
    assert results.verdicts["waits"].reward == 1.0
    assert results.warnings == [] and processes_of(pid_file) == 1


@pytest.mark.nightly
def test_what_a_scorer_prints_comes_out_and_blocks_nothing(
    capfd: pytest.CaptureFixture[str], score: Score
) -> None:
    results = score("prints", "waits", timeout_s=30.0)
    assert results.verdicts["prints"].reward == 1.0
    assert capfd.readouterr().out.count("x" * 100_000) == 200


@pytest.mark.nightly
def test_no_number_of_ends_of_a_process_stops_the_run(score: Score) -> None:
    texts = [f"exits {number}" for number in range(4)]
    results = score(*texts, "waits", then=("after",))
    assert {results.verdicts[text].reward for text in texts} == {None}
    assert results.verdicts["waits"].reward == results.verdicts["after"].reward == 1.0


@pytest.mark.nightly
def test_a_scorer_that_forks_without_end_is_killed_with_all_its_processes(
    pid_file: Path, score: Score
) -> None:
    results = score("forks_without_end", timeout_s=1.0)
    assert results.verdicts["forks_without_end"].reward is None
    assert results.verdicts["after"].reward == 1.0
    assert results.seconds < SECONDS
