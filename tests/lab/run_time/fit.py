"""Fits the constants of the simulation to real runs with one engine.

Constants of the engine are those with which simulated steps end as measured ones do, in the sense
of least squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import numpy.typing as npt

from tests.lab.run_time.measured_run import CannotFit, MeasuredRun, MeasuredStep
from tests.lab.run_time.simulation.cluster import Cluster, Group, Machines, Slowdown
from tests.lab.run_time.simulation.engine import EngineSpeed, Response
from tests.lab.run_time.simulation.lengths import GroupLengths, TraceLengths
from tests.lab.run_time.simulation.run import SimulatedRun, TrainerSpeed, simulate

_SCALES = {
    "dispatch": 0.1,
    "arrival": 5e-4,
    "step": 1e-2,
    "request": 1e-5,
    "kv_token": 1e-7,
    "prompt_token": 5e-5,
}
SPEED_NAMES = tuple(_SCALES)
# The time between arrivals hardly moves from where a fit starts: the best of several fits counts
_FIRST_ARRIVALS = (1e-4, 5e-4, 2e-3)
_MAX_ITERATIONS = 12
_DIFFERENCE = 1e-3  # relative step of the derivatives: the end of a simulated step has jumps
_MAX_SIMULATIONS = 16  # of a run
# Of the quickstart, as its engines log them. A timeline does not have the number.
PROMPT_TOKENS = 16


@dataclass(frozen=True)
class Constants:
    """The constants of a simulation.

    slowdowns: of each measured step. missing: constants that no run shows. They are 0.
    """

    speed: EngineSpeed
    trainer: TrainerSpeed
    slowdowns: tuple[Slowdown, ...]
    missing: tuple[str, ...]


def fit(runs: Sequence[MeasuredRun]) -> Constants:
    """Fit all constants.

    Runs with max_staleness=0 show how long sampling, training and the sync take alone. Those with
    on_update=wait above 0 show how much both slow each other down, and those with on_update=resume
    how long an interruption takes.

    Raises `CannotFit` without a run with max_staleness=0.
    """
    alone = [run for run in runs if not run.rollout.max_staleness]
    if not alone:
        raise CannotFit("no run has max_staleness=0: it shows what a step takes alone")
    ahead = [run for run in runs if run.rollout.max_staleness]
    waiting = [run for run in ahead if run.rollout.on_update == "wait"]
    resuming = [run for run in ahead if run.rollout.on_update == "resume"]
    speed = fit_engine(alone)
    trainer = fit_trainer(alone)
    missing = []
    interruptions = [
        step.next_rollouts for run in resuming for step in run.steps if step.is_sampling
    ]
    slowdowns: tuple[Slowdown, ...] = (Slowdown(),)
    if waiting:
        slowdowns = fit_slowdowns(waiting, speed, trainer)
    else:
        missing += ["engine_slowdown", "trainer_slowdown"]
    if interruptions:
        trainer = replace(trainer, interrupt=fmean(interruptions))
    else:
        missing.append("interrupt")
    return Constants(speed, trainer, slowdowns, missing=tuple(missing))


def fit_engine(runs: Sequence[MeasuredRun]) -> EngineSpeed:
    """Fit the seconds of forward passes to when each group was complete.

    The last group of a step weighs as much as all others together: the trainer waits for it.
    """
    steps = [(run, step) for run in runs for step in run.steps]
    return fit_speed(
        lambda speed: np.concatenate([_residuals(run, step, speed) for run, step in steps])
    )


def fit_speed(residuals_of: Callable[[EngineSpeed], npt.NDArray[np.float64]]) -> EngineSpeed:
    """Return the seconds of forward passes whose residuals have the least sum of squares."""
    from scipy.optimize import least_squares  # slow to import

    def residuals(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return residuals_of(_speed(values))

    scales = np.array(list(_SCALES.values()))
    results = []
    for arrival in _FIRST_ARRIVALS:
        start = scales.copy()
        start[SPEED_NAMES.index("arrival")] = arrival
        results.append(
            least_squares(
                residuals,
                start,
                bounds=(0.0, np.inf),
                x_scale=scales,
                diff_step=_DIFFERENCE,
                max_nfev=_MAX_ITERATIONS,
            )
        )
    return _speed(min(results, key=lambda result: result.cost).x)


def _speed(values: npt.NDArray[np.float64]) -> EngineSpeed:
    return EngineSpeed(**dict(zip(SPEED_NAMES, values.tolist(), strict=True)))


def _residuals(run: MeasuredRun, step: MeasuredStep, speed: EngineSpeed) -> npt.NDArray[np.float64]:
    """Return by how much each group is late in the simulation, with its weight."""
    machines = Machines(speed=speed, max_running=run.max_running)
    measured_ends = np.array([group.end for group in step.groups])
    weights = np.ones(len(measured_ends))
    weights[measured_ends.argmax()] = len(measured_ends) ** 0.5
    return weights * (group_ends(machines, _lengths(run, step)) - measured_ends)


def fit_trainer(runs: Sequence[MeasuredRun]) -> TrainerSpeed:
    """Fit the seconds of training to the tokens of a step, and the seconds of a sync."""
    from scipy.optimize import nnls  # slow to import

    steps = [step for run in runs for step in run.steps]
    columns = np.array([[1.0, float(step.tokens)] for step in steps])
    values, _ = nnls(columns, np.array([step.training for step in steps]))
    sync = fmean(step.rest for step in steps)
    return TrainerSpeed(step=float(values[0]), token=float(values[1]), sync=max(0.0, sync))


def fit_slowdowns(
    runs: Sequence[MeasuredRun], speed: EngineSpeed, trainer: TrainerSpeed
) -> tuple[Slowdown, ...]:
    """Fit by how much engine and trainer slowed each other down in each step.

    A time t during which the other one works, too, moves the end by t * slowdown / (1 + slowdown).
    Cores are shared in another way in each step: where the trainer is slow, the engine is often
    fast. So the mean alone would hide that a step takes as long as the slower of both.

    Raises `CannotFit` if both never work at the same time.
    """
    slowdowns = []
    for run in runs:
        for step, later in zip(run.steps, run.steps[1:], strict=False):
            # Groups of `later` count from its own start
            end = step.end + later.sampled_at
            overlap = min(end, step.trained_at) - step.taken_at
            if overlap <= 0:
                continue
            sampling = end - step.taken_at - alone_seconds(run, later, speed)
            training = step.training - trainer.step - trainer.token * step.tokens
            slowdowns.append(
                Slowdown(slowdown_of(sampling / overlap), slowdown_of(training / overlap))
            )
    if not slowdowns:
        raise CannotFit(
            "sampling and training never overlap in the runs with max_staleness above 0"
        )
    return tuple(slowdowns)


def slowdown_of(share: float) -> float:
    """Return the slowdown that makes this share of the time longer, within limits."""
    share = min(max(share, -1.0), 0.9)
    return share / (1 - share)


def alone_seconds(run: MeasuredRun, step: MeasuredStep, speed: EngineSpeed) -> float:
    """Return the seconds in which an engine samples a step alone."""
    return max(group_ends(Machines(speed=speed, max_running=run.max_running), _lengths(run, step)))


def group_ends(machines: Machines, lengths: GroupLengths) -> list[float]:
    """Return when each group of a step that is sampled alone is complete, in seconds."""
    cluster = Cluster(machines)
    groups = [
        Group([Response((1, i, j), PROMPT_TOKENS, n) for j, n in enumerate(group)])
        for i, group in enumerate(lengths)
    ]
    cluster.request(groups)
    cluster.wait(lambda: not any(group.num_open for group in groups))
    return [max(response.end for response in group.responses) for group in groups]


def _lengths(run: MeasuredRun, step: MeasuredStep) -> GroupLengths:
    return [split(group.tokens, run.rollout.samples_per_prompt) for group in step.groups]


def split(tokens: int, samples: int) -> list[int]:
    """Split the tokens of a group evenly among its samples: a timeline has only their sum."""
    base, rest = divmod(tokens, samples)
    return [max(1, base + (i < rest)) for i in range(samples)]


def trace_of(runs: Iterable[MeasuredRun], size: tuple[int, int]) -> TraceLengths:
    """Return the lengths of those runs whose steps have a size, or else the next larger one.

    Of larger steps, the first groups count. Raises `CannotFit` if all are smaller.
    """
    prompts, samples = size
    others = [run for run in runs if run.size[1] == samples and run.size[0] >= prompts]
    if not others:
        raise CannotFit(
            f"no run that constants are fitted to has {prompts} prompts x {samples} samples, or "
            "more prompts: the lengths of responses are unknown"
        )
    next_larger = min(run.size for run in others)
    steps = [
        _lengths(run, step)[:prompts]
        for run in others
        if run.size == next_larger
        for step in run.steps
    ]
    return TraceLengths(steps, PROMPT_TOKENS)


def simulator(
    constants: Constants, runs: Sequence[MeasuredRun]
) -> Callable[[MeasuredRun], list[SimulatedRun]]:
    """Return a function that simulates a run several times, with the lengths of `runs`.

    Each simulation begins with the slowdown of another measured step. One is enough for a run with
    max_staleness=0, in which nothing slows down.
    """

    def simulate_run(run: MeasuredRun) -> list[SimulatedRun]:
        trace = trace_of(runs, run.size)
        simulations = []
        is_ahead = run.rollout.max_staleness > 0
        for slowdowns in _rotations(constants.slowdowns if is_ahead else (Slowdown(),)):
            machines = Machines(
                speed=constants.speed, max_running=run.max_running, slowdowns=slowdowns
            )
            simulations.append(
                simulate(run.rollout, trace, machines, constants.trainer, run.num_steps)
            )
        return simulations

    return simulate_run


def _rotations(slowdowns: Sequence[Slowdown]) -> Iterator[Sequence[Slowdown]]:
    """Yield the slowdowns from other beginnings: as many as there are, but not too many."""
    count = min(_MAX_SIMULATIONS, len(slowdowns))
    for i in range(count):
        begin = i * len(slowdowns) // count
        yield (*slowdowns[begin:], *slowdowns[:begin])
