"""Reminders of long waits."""

from itertools import islice

import pytest

from megatron_rl.records.reminder import Reminder, growing_intervals


def test_intervals_grow_to_ten_minutes() -> None:
    assert list(islice(growing_intervals(), 9)) == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert list(islice(growing_intervals(900), 2)) == [900, 900]


def test_a_reminder_is_due_once_for_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100, 200))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    reminder = Reminder()
    due = [second for second in range(1, 90) if reminder.is_due()]
    assert due == [10, 30, 70]
