"""Measures how much of the best possible speed a run that samples ahead reaches.

The best possible step takes as long as the slower of sampling and training, plus what has to be
done between them. On few cores, two programs that have nothing to do with each other are slower at
the same time than one after the other. So sampling and training are also measured as two programs
side by side: `mode=rollout_only` and `mode=train_only`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from launch.studies.run_time.measured_run import CannotFit, MeasuredRun, read_run
from launch.studies.run_time.measurement import ONE_AHEAD, PlannedRun, command_of, train
from megatron_rl.records.past_run import read_metrics
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Lane, Span, read_timeline

_RECORDING = "recording"
_RECORDED_FACTOR = 2  # more steps than are trained while the other program samples
_PROGRAM_SECONDS = 900.0
_STOP_SECONDS = 60.0
_POLL_SECONDS = 0.2


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
    _train(directory, recording, _RECORDED_FACTOR * num_steps, log)
    return [_measure_round(directory, seed, num_steps, log) for seed in range(num_rounds)]


def rounds_table(rounds: Sequence[Round]) -> Iterator[str]:
    """Yield a table of the rounds, and the means with their standard errors."""
    yield (
        "| seed | step | of it sampling | training | rest | step, ahead | faster | side by side: "
        "sampling | training | of the best possible | of two programs |"
    )
    yield "|---" * 11 + "|"
    for seed, measured in enumerate(rounds):
        yield f"| {seed} | {' | '.join(_cells(measured))} |"
    yield ""
    yield f"Faster: {_mean_text([item.speed_up for item in rounds], '.2f')} x."
    yield f"Of the best possible: {_mean_text([100 * item.of_alone for item in rounds])} %."
    yield f"Of two programs: {_mean_text([100 * item.of_beside for item in rounds])} %."


def _cells(measured: Round) -> Iterator[str]:
    """Yield the cells of a row after the seed."""
    for seconds in (
        measured.step,
        measured.sampling,
        measured.training,
        measured.rest,
        measured.step_ahead,
    ):
        yield f"{seconds:.2f}"
    yield f"{measured.speed_up:.2f} x"
    yield f"{measured.sampling_beside:.2f}"
    yield f"{measured.training_beside:.2f}"
    yield f"{measured.of_alone:.0%}"
    yield f"{measured.of_beside:.0%}"


def _mean_text(values: Sequence[float], digits: str = ".0f") -> str:
    """Write a mean with its standard error, or the only value."""
    text = f"{fmean(values):{digits}}"
    if len(values) > 1:
        text += f" ± {stdev(values) / len(values) ** 0.5:{digits}}"
    return text


def _measure_round(directory: Path, seed: int, num_steps: int, log: Callable[[str], None]) -> Round:
    setting = f"seed={seed}"
    plans = [
        PlannedRun(f"alone-seed{seed}", (setting,)),
        PlannedRun(f"ahead-seed{seed}", (setting, ONE_AHEAD)),
    ]
    # The speed of a machine changes over minutes: no kind of run is always the first
    if seed % 2:
        plans.reverse()
    for plan in plans:
        _train(directory, plan, num_steps, log)
    alone = read_run(directory / f"alone-seed{seed}")
    ahead = read_run(directory / f"ahead-seed{seed}")
    sampling_beside, training_beside = _measure_beside(directory, seed, num_steps, log)
    return Round(
        step=alone.seconds_a_step,
        sampling=fmean(step.taken_at for step in alone.steps),
        training=fmean(step.training for step in alone.steps),
        rest=_rest(alone),
        step_ahead=ahead.seconds_a_step,
        sampling_beside=sampling_beside,
        training_beside=training_beside,
    )


def _rest(run: MeasuredRun) -> float:
    return fmean(step.rest for step in run.steps)


def _train(directory: Path, plan: PlannedRun, num_steps: int, log: Callable[[str], None]) -> None:
    if (directory / plan.name).exists():
        return
    log(f"training {plan.name}; load average before it: {os.getloadavg()[0]:.1f}")
    train(directory, plan, num_steps)


def _measure_beside(
    directory: Path, seed: int, num_steps: int, log: Callable[[str], None]
) -> tuple[float, float]:
    """Return the seconds a step of two programs side by side: of sampling, and of training."""
    sampling = directory / f"sampling-seed{seed}"
    training = directory / f"training-seed{seed}"
    if not sampling.exists() or not training.exists():
        log(f"running {sampling.name} and {training.name}")
        _run_beside(directory, seed, num_steps)
    return beside_seconds(sampling, training)


def _run_beside(directory: Path, seed: int, num_steps: int) -> None:
    """Sample and train at the same time. The one that has more to do is stopped."""
    plans = [
        (PlannedRun(f"sampling-seed{seed}", (f"seed={seed}", "mode=rollout_only")), num_steps),
        (
            PlannedRun(
                f"training-seed{seed}",
                (
                    "mode=train_only",
                    f"rollout.recording={(directory / _RECORDING).resolve()}",
                    "train.max_route_disagreement=1",
                ),
            ),
            _RECORDED_FACTOR * num_steps,
        ),
    ]
    programs: list[subprocess.Popen[bytes]] = []
    try:
        for plan, steps in plans:
            log_file = directory / f"{plan.name}.log"
            with log_file.open("w") as output:
                programs.append(
                    subprocess.Popen(
                        command_of(directory, plan, steps),
                        env=os.environ | {"OMP_NUM_THREADS": "1"},
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait_for_any(programs, directory)
    finally:
        for program in programs:
            program.terminate()
        for program in programs:
            program.wait(_STOP_SECONDS)


def _wait_for_any(programs: Sequence[subprocess.Popen[bytes]], directory: Path) -> None:
    """Wait until one of the programs has ended. Raises `CannotFit` if it fails, or takes too long.

    directory: of their logs.
    """
    deadline = time.monotonic() + _PROGRAM_SECONDS
    while all(program.poll() is None for program in programs):
        if time.monotonic() > deadline:
            raise CannotFit(f"two programs side by side took longer than {_PROGRAM_SECONDS:g} s")
        time.sleep(_POLL_SECONDS)
    if any(program.poll() for program in programs):
        raise CannotFit(
            f"one of two programs side by side failed: see the logs in {directory}. Remove the "
            "directories of their runs, and start again"
        )


def beside_seconds(sampling: Path, training: Path) -> tuple[float, float]:
    """Return the mean seconds of those steps during which the other program worked, too.

    sampling, training: directories of runs with mode=rollout_only and mode=train_only. The first
    is the time from the first request of a step to its last response, and the second is that of a
    step without reading its rollouts. Raises `CannotFit` if no steps overlap.
    """
    samples = _sampling_times(sampling)
    trainings = _training_times(training)
    sampled = [
        end - start
        for start, end in samples[1:]
        if trainings and trainings[0][0] <= start and end <= trainings[-1][1]
    ]
    trained = [
        seconds
        for start, end, seconds in trainings[1:]
        if samples and samples[0][0] <= start and end <= samples[-1][1]
    ]
    if not sampled or not trained:
        raise CannotFit(
            f"{sampling} and {training} never worked at the same time. Remove both, and start again"
        )
    return fmean(sampled), fmean(trained)


def _sampling_times(run: Path) -> list[tuple[float, float]]:
    """Return when each step was sampled."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in _spans(run):
        if span.lane is Lane.ROLLOUTS and span.step >= 1:
            starts[span.step] = min(span.start, starts.get(span.step, span.start))
            ends[span.step] = max(span.end, ends.get(span.step, span.end))
    return [(starts[step], ends[step]) for step in sorted(starts)]


def _training_times(run: Path) -> list[tuple[float, float, float]]:
    """Return when each step was trained, and the seconds of the step without its rollouts."""
    records = {int(record["step"] or 0): record for record in read_metrics(run)}
    times = []
    for span in _spans(run):
        record = records.get(span.step)
        if span.name == "train" and record is not None:
            seconds = (record["time/step"] or 0.0) - (record["time/rollout"] or 0.0)
            times.append((span.start, span.end, seconds))
    return times


def _spans(run: Path) -> list[Span]:
    file = run / TIMELINE_FILE
    return list(read_timeline(file)) if file.exists() else []
