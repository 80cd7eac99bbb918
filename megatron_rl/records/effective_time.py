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

    Steps and evaluations count. Starts, gaps between starts, checkpoints, and steps that were
    trained again do not.

    first_start: in seconds since 1970.
    """

    def __init__(self, first_start: float, *, clock: Callable[[], float] = time.time) -> None:
        self._first_start = first_start
        self._clock = clock
        self._seconds_by_step: dict[int, float] = {}

    def add(self, step: int, record: Mapping[str, float | None]) -> None:
        """Take the record of a step. Of several records of a step, the last one counts."""
        self._seconds_by_step[step] = seconds_of_step(record)

    def after(self, step: int, record: Mapping[str, float | None]) -> float:
        """Return the share after a step with this record. NaN when clocks contradict each other."""
        self.add(step, record)
        age = self._clock() - self._first_start
        return min(1.0, sum(self._seconds_by_step.values()) / age) if age > 0 else math.nan


def open_effective_time(
    directory: Path, *, clock: Callable[[], float] = time.time
) -> EffectiveTime | None:
    """Go on with the effective time of a run, None when it has no record of its starts."""
    starts = read_starts(directory)
    if not starts:
        return None
    effective_time = EffectiveTime(starts[0].time, clock=clock)
    with contextlib.suppress(RunUnreadable):
        for record in iterate_metrics(directory):
            effective_time.add(round(record.get("step") or 0), record)
    return effective_time


def seconds_of_step(record: Mapping[str, float | None]) -> float:
    """Return the seconds of a step and of the evaluations after it."""
    return (record.get("time/step") or 0.0) + seconds_of_evaluations(record)


def seconds_of_evaluations(record: Mapping[str, float | None]) -> float:
    """Return the seconds of the evaluations after a step, also of those of eval.sets."""
    names = [name for name in record if name == "time/eval" or name.startswith(_SETS)]
    return sum(record[name] or 0.0 for name in names)


def is_time(name: str) -> bool:
    """True for metrics that differ between two runs which are equal bit for bit."""
    return name.startswith("time/") or name == EFFECTIVE_TIME


def last_effective_time(records: list[Record]) -> float | None:
    """Return the effective time of the last record that has one."""
    values = (record.get(EFFECTIVE_TIME) for record in reversed(records))
    return next((value for value in values if value is not None), None)
