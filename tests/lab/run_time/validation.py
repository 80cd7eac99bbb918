"""Compares simulated with measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from tests.lab.run_time.fit import SPEED_NAMES, Constants, simulator
from tests.lab.run_time.measured_run import FIRST_STEP, MeasuredRun

BAR = 0.05
_UNITS = {
    "dispatch": "s from a request until its engine has it",
    "arrival": "s between two requests that reach an engine",
    "step": "s a forward pass",
    "request": "s a response of a decode pass",
    "kv_token": "s a token of a context",
    "prompt_token": "s to read a token of a prompt, or of a partial response",
}


@dataclass(frozen=True)
class Comparison:
    """Runs with equal settings, but for the seed, and their simulations in seconds a step."""

    runs: Sequence[MeasuredRun]
    simulations: Sequence[float]
    is_fitted: bool

    @property
    def measured_seconds(self) -> float:
        """The mean of the runs."""
        return fmean(run.seconds_a_step for run in self.runs)

    @property
    def measured_error(self) -> float:
        """The standard error of that mean. That of a single run is the one over its steps."""
        if len(self.runs) == 1:
            return self.runs[0].standard_error
        return _standard_error([run.seconds_a_step for run in self.runs])

    @property
    def simulated_seconds(self) -> float:
        """The mean of the simulations."""
        return fmean(self.simulations)

    @property
    def simulated_error(self) -> float:
        """The standard error of that mean, 0 for a single simulation."""
        return _standard_error(self.simulations) if len(self.simulations) > 1 else 0.0

    @property
    def error(self) -> float:
        """The relative error of the simulations."""
        return self.simulated_seconds / self.measured_seconds - 1


def compare(
    constants: Constants, fitted_runs: Sequence[MeasuredRun], others: Sequence[MeasuredRun]
) -> list[Comparison]:
    """Simulate all runs. constants: fitted to some of them. Raises `CannotFit`."""
    simulate_run = simulator(constants, fitted_runs)
    return [
        Comparison(
            repeats,
            [run.seconds_a_step(FIRST_STEP) for run in simulate_run(repeats[0])],
            is_fitted,
        )
        for runs, is_fitted in ((fitted_runs, True), (others, False))
        for repeats in _group_repeats(runs)
    ]


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / len(values) ** 0.5


def _group_repeats(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """Group runs that did the same work, in the order of their first ones."""
    groups: list[list[MeasuredRun]] = []
    for run in runs:
        for group in groups:
            if run.repeats(group[0]):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def comparison_table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the table, then the largest error of the runs that were not fitted."""
    yield (
        "| first run | prompts x samples | `max_running_requests` | `max_staleness` | `on_update` "
        "| runs | measured s/step | simulated | error | fitted |"
    )
    yield "|---" * 10 + "|"
    for item in comparisons:
        run = item.runs[0]
        cells = [
            run.name,
            f"{run.size[0]} x {run.size[1]}",
            str(run.max_running),
            str(run.rollout.max_staleness),
            run.rollout.on_update,
            str(len(item.runs)),
            f"{item.measured_seconds:.2f} ± {item.measured_error:.2f}",
            f"{item.simulated_seconds:.2f} ± {item.simulated_error:.2f}",
            f"{item.error:+.1%}",
            "yes" if item.is_fitted else "no",
        ]
        yield "| " + " | ".join(cells) + " |"
    errors = [abs(item.error) for item in comparisons if not item.is_fitted]
    if errors:
        yield ""
        yield f"Largest error of runs that were not fitted: {max(errors):.1%}. Bar: {BAR:.0%}."


def constant_table(constants: Constants) -> Iterator[str]:
    """Yield all constants with their kinds. Slowdowns have a mean and a standard deviation."""
    yield "| constant | value | unit | kind |"
    yield "|---|---|---|---|"
    trainer = constants.trainer
    rows = {name: (f"{getattr(constants.speed, name):.3g}", _UNITS[name]) for name in SPEED_NAMES}
    rows |= {
        "training_step": (f"{trainer.step:.3g}", "s a step"),
        "training_token": (f"{trainer.token:.3g}", "s a sampled token"),
        "sync": (f"{trainer.sync:.3g}", "s in which engines rest: sync, account, records"),
        "interrupt": (f"{trainer.interrupt:.3g}", "s to stop responses that are running (resume)"),
        "engine_slowdown": (
            _spread([slowdown.engine for slowdown in constants.slowdowns]),
            "of an engine while the trainer works",
        ),
        "trainer_slowdown": (
            _spread([slowdown.trainer for slowdown in constants.slowdowns]),
            "of the trainer while an engine works",
        ),
    }
    for name, (value, unit) in rows.items():
        kind = "assumed: no run shows it" if name in constants.missing else "fitted"
        yield f"| {name} | {value} | {unit} | {kind} |"


def _spread(values: Sequence[float]) -> str:
    """Write the mean of values, and their standard deviation."""
    text = f"{fmean(values):.3g}"
    return f"{text} (varies by {stdev(values):.2g})" if len(values) > 1 else text
