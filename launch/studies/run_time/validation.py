"""Compares simulated with measured runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.studies.run_time.fit import SPEED_NAMES, Constants, simulator
from launch.studies.run_time.measured_run import FIRST_STEP, MeasuredRun

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
    """A run and its simulation, in seconds a step."""

    run: MeasuredRun
    simulated_seconds: float
    is_fitted: bool

    @property
    def error(self) -> float:
        """The relative error of the simulation."""
        return self.simulated_seconds / self.run.seconds_a_step - 1


def compare(
    constants: Constants, fitted_runs: Sequence[MeasuredRun], others: Sequence[MeasuredRun]
) -> list[Comparison]:
    """Simulate all runs. constants: fitted to some of them. Raises `CannotFit`."""
    simulate_run = simulator(constants, fitted_runs)
    return [
        Comparison(run, simulate_run(run).seconds_a_step(FIRST_STEP), is_fitted)
        for runs, is_fitted in ((fitted_runs, True), (others, False))
        for run in runs
    ]


def comparison_table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Yield the table, then the largest error of the runs that were not fitted."""
    yield (
        "| run | prompts x samples | `max_staleness` | `on_update` | seed | measured s/step | "
        "simulated | error | fitted |"
    )
    yield "|---" * 9 + "|"
    for item in comparisons:
        run = item.run
        cells = [
            run.name,
            f"{run.size[0]} x {run.size[1]}",
            str(run.rollout.max_staleness),
            run.rollout.on_update,
            str(run.seed),
            f"{run.seconds_a_step:.2f} ± {run.standard_error:.2f}",
            f"{item.simulated_seconds:.2f}",
            f"{item.error:+.1%}",
            "yes" if item.is_fitted else "no",
        ]
        yield "| " + " | ".join(cells) + " |"
    errors = [abs(item.error) for item in comparisons if not item.is_fitted]
    if errors:
        yield ""
        yield f"Largest error of runs that were not fitted: {max(errors):.1%}. Bar: {BAR:.0%}."


def constant_table(constants: Constants) -> Iterator[str]:
    """Yield all constants with their kinds."""
    yield "| constant | value | unit | kind |"
    yield "|---|---|---|---|"
    for name in SPEED_NAMES:
        yield f"| {name} | {getattr(constants.speed, name):.3g} | {_UNITS[name]} | fitted |"
    trainer = constants.trainer
    rows = {
        "training_step": (trainer.step, "s a step"),
        "training_token": (trainer.token, "s a sampled token"),
        "sync": (trainer.sync, "s in which engines rest: sync, account, records"),
        "interrupt": (trainer.interrupt, "s to stop responses that are running (resume)"),
        "engine_slowdown": (constants.engine_slowdown, "of an engine while the trainer works"),
        "trainer_slowdown": (constants.trainer_slowdown, "of the trainer while an engine works"),
    }
    for name, (value, unit) in rows.items():
        kind = "assumed: no run shows it" if name in constants.missing else "fitted"
        yield f"| {name} | {value:.3g} | {unit} | {kind} |"
