"""Monitors of several ranks, and the samples of this process."""

import threading
import time
from collections.abc import Callable

import pytest
import torch.distributed as dist

from megatron_rl.run.supervision.rank_sample import sample_rank
from megatron_rl.run.supervision.stall_monitor import StallMonitor
from megatron_rl.training.activity import Activity

SAMPLE_SECONDS = 0.02
STALL_SECONDS = 0.2


def monitor(
    rank: int, activity: Activity, store: dist.Store, log: Callable[[str], None]
) -> StallMonitor:
    return StallMonitor(
        rank,
        2,
        activity,
        store,
        log,
        sample_seconds=SAMPLE_SECONDS,
        stall_seconds=STALL_SECONDS,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def hang_in_user_code(end: threading.Event) -> None:
    end.wait(30)


def test_a_sample_holds_the_command_and_the_stack_of_the_main_thread() -> None:
    activity = Activity()
    samples = []
    end = threading.Event()

    def sample() -> None:
        time.sleep(0.2)
        samples.append(sample_rank(7, activity.current))
        end.set()

    with activity.command("Train, step 3"):
        thread = threading.Thread(target=sample)
        thread.start()
        hang_in_user_code(end)
        thread.join()
    (rank_sample,) = samples
    assert (rank_sample.count, rank_sample.number) == (7, 1)
    assert rank_sample.command == "Train, step 3"
    assert any("hang_in_user_code" in call for call in rank_sample.stack)


def test_a_rank_between_two_commands_waits_for_the_next_one() -> None:
    sample = sample_rank(1, Activity().current)
    assert sample.is_waiting and sample.number == 0 and not sample.stack


def test_rank_zero_reports_the_rank_that_stopped_responding_again_and_again() -> None:
    store = dist.HashStore()
    lines: list[str] = []
    reported_twice = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        if len(lines) > 1:
            reported_twice.set()

    activity = Activity()
    other_activity = Activity()
    with (
        activity.command("Train, step 1"),
        other_activity.command("Train, step 1"),
        monitor(0, activity, store, log),
    ):
        with monitor(1, other_activity, store, log):
            wait_until(lambda: store.check(["rank_sample/1"]))
        assert reported_twice.wait(30)
    # This thread plays both ranks, so rank 0 is not in a collective
    assert all("rank 1 (Train, step 1) has not responded" in line for line in lines)


def test_short_commands_are_not_reported() -> None:
    store = dist.HashStore()
    lines: list[str] = []
    activity = Activity()
    with monitor(0, activity, store, lines.append), monitor(1, activity, store, lines.append):
        end = time.monotonic() + 3 * STALL_SECONDS
        while time.monotonic() < end:
            with activity.command("Poll"):
                time.sleep(SAMPLE_SECONDS / 4)
    assert not lines


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_store_that_fails_ends_the_monitor_and_not_the_run() -> None:
    class FailingStore(dist.HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection lost")

    lines: list[str] = []
    activity = Activity()
    with activity.command("Train, step 1"), monitor(0, activity, FailingStore(), lines.append):
        time.sleep(3 * STALL_SECONDS)
    assert not lines
