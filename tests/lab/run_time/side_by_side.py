"""Measures how much of the ideal speed a run that samples ahead reaches.

An ideal step takes as long as the slower of sampling and training, plus what has to be done between
them. On few cores, two programs that have nothing to do with each other are slower at the same time
than one after the other. So sampling and training are also measured as two programs side by side:
`mode=rollout_only` and `mode=train_only`.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from megatron_rl.records.past_run import read_metrics
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Lane, Span, read_timeline
from tests.lab.run_time.measured_run import FIRST_STEP, CannotFit, read_run
from tests.lab.run_time.measurement import (
    ONE_AHEAD,
    PlannedRun,
    command_of,
    count_steps,
    environment,
    train_once,
)

_RECORDING = "recording"
BESIDE_FACTOR = 2
"""Factor of the steps of programs side by side: one of them starts later."""
_POLL_SECONDS = 0.2

# Start and end, in seconds since 1970
_Time = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Round:
    """The seconds of a step. All of them were measured within a few minutes.

    step: with max_staleness=0. sampling, training, rest: its parts. step_ahead: with
    max_staleness=1. sampling_beside, training_beside: as two programs side by side.
    """

    step: float
    sampling: float
    training: float
    rest: float
    step_ahead: float
    sampling_beside: float
    training_beside: float

    @property
    def speed_up(self) -> float:
        """The factor by which a step is faster if the next one is sampled meanwhile."""
        return self.step / self.step_ahead

    @property
    def of_alone(self) -> float:
        """The speed as a part of that with cores for each."""
        return (max(self.sampling, self.training) + self.rest) / self.step_ahead

    @property
    def of_beside(self) -> float:
        """The speed as a part of that with programs that only share the cores.

        Each is slower while both work. When one is done, the other one is as fast as alone.
        """
        first, second = sorted(
            [(self.sampling_beside, self.sampling), (self.training_beside, self.training)]
        )
        overlap = first[0]
        done_meanwhile = overlap * second[1] / second[0]
        return (overlap + second[1] - done_meanwhile + self.rest) / self.step_ahead


def measure_rounds(
    directory: Path, num_rounds: int, num_steps: int, log: Callable[[str], None]
) -> list[Round]:
    """Measure some rounds one after the other. Raises `CannotFit` for a run that fails.

    Each round has another seed. Runs whose directories exist are not trained again.
    """
    recording = PlannedRun(_RECORDING, ("mode=rollout_only",))
    train_once(directory, recording, BESIDE_FACTOR * num_steps, log)
    return [_measure_round(directory, seed, num_steps, log) for seed in range(num_rounds)]


def rounds_table(rounds: Sequence[Round]) -> Iterator[str]:
    """Yield a table of the rounds, and the means with their standard errors."""
    yield (
        "| seed | step | its sampling | its training | rest | step, ahead | faster | side by side: "
        "sampling | training | of the ideal speed | of the speed of two programs |"
    )
    yield "|---" * 11 + "|"
    for seed, row in enumerate(rounds):
        yield f"| {seed} | {' | '.join(_cells(row))} |"
    yield ""
    of_ideal = [100 * item.of_alone for item in rounds]
    of_programs = [100 * item.of_beside for item in rounds]
    yield f"Faster: {_mean_text([item.speed_up for item in rounds], '.2f')} x."
    yield f"Of the ideal speed: {_mean_text(of_ideal)} %."
    yield f"Of the speed of two programs: {_mean_text(of_programs)} %."


def _cells(row: Round) -> Iterator[str]:
    """Yield the cells of a row after the seed."""
    for seconds in (
        row.step,
        row.sampling,
        row.training,
        row.rest,
        row.step_ahead,
    ):
        yield f"{seconds:.2f}"
    yield f"{row.speed_up:.2f} x"
    yield f"{row.sampling_beside:.2f}"
    yield f"{row.training_beside:.2f}"
    yield f"{row.of_alone:.0%}"
    yield f"{row.of_beside:.0%}"


def _mean_text(values: Sequence[float], digits: str = ".0f") -> str:
    """Write a mean with its standard error, or the only value."""
    text = f"{fmean(values):{digits}}"
    if len(values) > 1:
        text += f" ± {stdev(values) / len(values) ** 0.5:{digits}}"
    return text


def _measure_round(directory: Path, seed: int, num_steps: int, log: Callable[[str], None]) -> Round:
    plan_alone = PlannedRun("alone", ()).with_seed(seed)
    plan_ahead = PlannedRun("ahead", (ONE_AHEAD,)).with_seed(seed)
    plans = [plan_alone, plan_ahead]
    # The speed of a machine changes over minutes: no kind of run is always the first
    if seed % 2:
        plans.reverse()
    for plan in plans:
        train_once(directory, plan, num_steps, log)
    alone = read_run(directory / plan_alone.name)
    ahead = read_run(directory / plan_ahead.name)
    sampling_beside, training_beside = measure_beside(directory, seed, num_steps, log)
    return Round(
        step=alone.seconds_a_step,
        sampling=fmean(step.taken_at for step in alone.steps),
        training=fmean(step.training for step in alone.steps),
        rest=fmean(step.rest for step in alone.steps),
        step_ahead=ahead.seconds_a_step,
        sampling_beside=sampling_beside,
        training_beside=training_beside,
    )


def measure_beside(
    directory: Path, seed: int, num_steps: int, log: Callable[[str], None]
) -> tuple[float, float]:
    """Return the seconds a step of two programs side by side: of sampling, and of training.

    Programs whose directories exist are not started again. Raises `CannotFit` if one fails, or if
    neither has all steps.
    """
    sampling = PlannedRun("sampling", ("mode=rollout_only",)).with_seed(seed)
    training = PlannedRun(
        f"training-seed{seed}",
        (
            "mode=train_only",
            f"rollout.recording={(directory / _RECORDING).resolve()}",
            "train.max_route_disagreement=1",
        ),
    )
    plans = (sampling, training)
    runs = [directory / plan.name for plan in plans]
    num_steps *= BESIDE_FACTOR
    if not all(run.exists() for run in runs):
        log(f"running {sampling.name} and {training.name}")
        run_beside(
            directory,
            {plan.name: command_of(directory, plan, num_steps) for plan in plans},
            is_begun=lambda: bool(_sampling_times(runs[0])),
        )
    if all(count_steps(run) != num_steps for run in runs):
        raise CannotFit(
            f"neither {runs[0]} nor {runs[1]} has {num_steps} steps. Remove both, and start again"
        )
    return beside_seconds(*runs)


def run_beside(
    directory: Path,
    commands: Mapping[str, Sequence[str]],
    is_begun: Callable[[], bool],
    *,
    limit: float = 900.0,
    stop_seconds: float = 60.0,
) -> None:
    """Run two programs at the same time, until the first one has ended, and stop the other one.

    commands: by the name of a log in the directory. The second program starts once `is_begun` is
    true for the first one.
    limit: seconds for both.
    stop_seconds: after them, a program that was told to end is killed.

    Raises `CannotFit` if a program fails, or at the limit.
    """
    programs: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + limit

    def wait() -> None:
        if time.monotonic() > deadline:
            raise CannotFit(f"two programs took longer than {limit:g} s: {_remedy(directory)}")
        time.sleep(_POLL_SECONDS)

    try:
        for name, command in commands.items():
            programs.append(_start(directory / f"{name}.log", command))
            while len(programs) == 1 and programs[0].poll() is None and not is_begun():
                wait()
        while all(program.poll() is None for program in programs):
            wait()
        if any(program.poll() for program in programs):
            raise CannotFit(f"a program failed: {_remedy(directory)}")
    finally:
        for program in programs:
            program.terminate()
        for program in programs:
            _end(program, stop_seconds)


def _start(log_file: Path, command: Sequence[str]) -> subprocess.Popen[bytes]:
    with log_file.open("w") as output:
        return subprocess.Popen(
            command,
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def _remedy(directory: Path) -> str:
    return f"see the logs in {directory}. Remove the directories of these runs, and start again"


def _end(program: subprocess.Popen[bytes], seconds: float) -> None:
    """Wait for a program that was told to end, and kill it if it does not."""
    try:
        program.wait(seconds)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


def beside_seconds(sampling: Path, training: Path) -> tuple[float, float]:
    """Return the mean seconds of those steps during which the other program worked, too.

    sampling, training: directories of runs with mode=rollout_only and mode=train_only. The first
    is the time from the first request of a step to its last response, and the second is the
    time of training with all that rank 0 computes before it. Raises `CannotFit` if no steps
    overlap.
    """
    samples = _sampling_times(sampling)
    trainings = _training_times(training)
    sampling_seconds = _within(samples, trainings)
    training_seconds = _within(trainings, samples)
    if not sampling_seconds or not training_seconds:
        raise CannotFit(
            f"{sampling} and {training} never worked at the same time. Remove both, and start "
            "again with more --steps"
        )
    return fmean(sampling_seconds), fmean(training_seconds)


def _within(times: Sequence[_Time], others: Sequence[_Time]) -> list[float]:
    """Return the seconds of those times that lie between the first and the last of the others."""
    if not others:
        return []
    return [end - start for start, end in times if others[0][0] <= start and end <= others[-1][1]]


def _sampling_times(run: Path) -> list[_Time]:
    """Return when each step from `FIRST_STEP` on was sampled."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in _spans(run):
        if span.lane is Lane.ROLLOUTS and span.step >= FIRST_STEP:
            starts[span.step] = min(span.start, starts.get(span.step, span.start))
            ends[span.step] = max(span.end, ends.get(span.step, span.end))
    return [(starts[step], ends[step]) for step in sorted(starts)]


def _training_times(run: Path) -> list[_Time]:
    """Return when each step from `FIRST_STEP` on was trained, with the computation before it."""
    records = {int(record["step"] or 0): record for record in read_metrics(run)}
    times = []
    for span in _spans(run):
        is_training = span.lane is Lane.RANKS and span.name == "train" and span.step >= FIRST_STEP
        if is_training and span.step in records:
            times.append((span.start - (records[span.step]["time/credit"] or 0.0), span.end))
    return times


def _spans(run: Path) -> list[Span]:
    file = run / TIMELINE_FILE
    return list(read_timeline(file)) if file.exists() else []
