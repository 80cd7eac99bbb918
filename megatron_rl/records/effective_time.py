"""Effective training time: the share of a run's time that became steps which it kept."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_rl.records.past_run import Record, RunUnreadable, iterate_metrics
from megatron_rl.records.starts import read_starts

EFFECTIVE_TIME = "run/effective_time"
_SETS = "time/eval/"


class EffectiveTime:
    """Measures which share of the time since the first start of a run is in its records.

    Steps and evaluations count. Starts, gaps between starts, checkpoints and steps that were
    trained again do not.

    first_start: in seconds since 1970. seconds: those of the steps that the run has kept so far.
    """

    def __init__(
        self, first_start: float, seconds: float = 0.0, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._first_start = first_start
        self._seconds = seconds
        self._clock = clock

    def after(self, record: Mapping[str, float | None]) -> float:
        """Return the share after a step with this record. NaN when clocks contradict each other."""
        self._seconds += seconds_of_step(record)
        age = self._clock() - self._first_start
        return min(1.0, self._seconds / age) if age > 0 else math.nan


def open_effective_time(directory: Path) -> EffectiveTime | None:
    """Go on with the effective time of a run, None when it has no record of its starts."""
    starts = read_starts(directory)
    if not starts:
        return None
    seconds_by_step: dict[float | None, float] = {}
    with contextlib.suppress(RunUnreadable):
        for record in iterate_metrics(directory):
            seconds_by_step[record.get("step")] = seconds_of_step(record)
    return EffectiveTime(starts[0].time, sum(seconds_by_step.values()))


def seconds_of_step(record: Mapping[str, float | None]) -> float:
    """Return the seconds of a step and of the evaluations after it."""
    names = ["time/step", "time/eval"]
    names += (name for name in record if name.startswith(_SETS))
    return sum(record.get(name) or 0.0 for name in names)


def is_time(name: str) -> bool:
    """True for metrics that differ between two runs which are equal bit for bit."""
    return name.startswith("time/") or name == EFFECTIVE_TIME


def last_effective_time(records: list[Record]) -> float | None:
    """Return the effective time of the last record that has one."""
    values = (record.get(EFFECTIVE_TIME) for record in reversed(records))
    return next((value for value in values if value is not None), None)
