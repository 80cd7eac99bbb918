"""The share of its time that a run trains, and a model of it for machines that fail."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# Hours of one GPU between failures
GPU_HOURS_PER_FAILURE = 50_700.0
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Recovery:
    """A fault and what it cost. seconds: until the record of the next step.

    lost_seconds: the time that the steps after it, until the next fault, took longer than others.
    """

    fault: str
    seconds: float
    lost_seconds: float


@dataclass(frozen=True)
class EffectiveTime:
    """The time of a run. wall_seconds: between its first and its last step.

    step_seconds: the median time of a step that no fault disturbed. num_steps: in the time.
    """

    wall_seconds: float
    step_seconds: float
    num_steps: int
    recoveries: list[Recovery]

    @property
    def share(self) -> float:
        """The share of the time that undisturbed steps would have needed for as many steps."""
        return min(1.0, self.num_steps * self.step_seconds / self.wall_seconds)

    @property
    def lost_seconds_per_fault(self) -> float:
        """The mean time that a fault cost."""
        if not self.recoveries:
            return 0.0
        return sum(r.lost_seconds for r in self.recoveries) / len(self.recoveries)


def measure(
    step_times: Mapping[int, float], faults: Sequence[tuple[float, str]], *, settle: float
) -> EffectiveTime:
    """Measure the time of a run.

    step_times: when the record of each step appeared. faults: when each struck, and its name.
    settle: seconds after a fault in which steps count as disturbed.
    """
    moments = [step_times[step] for step in sorted(step_times)]
    durations = [(end, end - start) for start, end in itertools.pairwise(moments)]
    calm = [
        seconds
        for end, seconds in durations
        if not any(end - seconds - settle <= moment <= end for moment, _ in faults)
    ]
    step_seconds = median(calm or [seconds for _, seconds in durations])
    excess = [(end, seconds, seconds - step_seconds) for end, seconds in durations]
    recoveries = [
        Recovery(name, next(end for end in moments if end > moment) - moment, max(0.0, loss))
        for (moment, name), loss in zip(faults, _losses(excess, faults, settle), strict=True)
        if moment < moments[-1]
    ]
    return EffectiveTime(moments[-1] - moments[0], step_seconds, len(durations), recoveries)


def _losses(
    excess: Sequence[tuple[float, float, float]],
    faults: Sequence[tuple[float, str]],
    settle: float,
) -> list[float]:
    """Add the excess of each step to the last fault before its end.

    excess: the end of each step, its seconds, and how much more these are than usual.
    """
    losses = [0.0] * len(faults)
    for end, seconds, more in excess:
        causes = [
            index
            for index, (moment, _) in enumerate(faults)
            if end - seconds - settle < moment < end
        ]
        if causes:
            losses[causes[-1]] += more
    return losses


def model_share(lost_seconds: float, num_gpus: int) -> float:
    """Return the share of time that a run on `num_gpus` trains, if each failure costs so much.

    It assumes that failures are independent, do not overlap, and hit an engine or a collector.
    """
    failures_per_hour = num_gpus / GPU_HOURS_PER_FAILURE
    return 1.0 - lost_seconds / _SECONDS_PER_HOUR * failures_per_hour
