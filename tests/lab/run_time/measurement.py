"""Trains the runs to which constants are fitted, and those that check them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megatron_rl.records.past_run import read_metrics
from tests.lab.run_time.measured_run import CannotFit, MeasuredRun, read_run

_ROOT = Path(__file__).resolve().parents[3]
_SETTINGS = (
    "experiment=quickstart",
    "parallel=single",
    "eval.every=0",
    "data.num_eval=16",  # the one after the last step
    "run.save_weights=false",
    "samples.every=0",
    "logger.progress=false",
)
_RUN_SECONDS = 900.0


class PlannedRun(NamedTuple):
    """A run to train. settings: beside the settings of all runs."""

    name: str
    settings: tuple[str, ...]
    is_fitted: bool = False

    def with_seed(self, seed: int) -> PlannedRun:
        """Return the same run with a seed, also in its name."""
        settings = (f"seed={seed}", *self.settings)
        return self._replace(name=f"{self.name}-seed{seed}", settings=settings)


ONE_AHEAD = "rollout.max_staleness=1"
_TWO_AHEAD = "rollout.max_staleness=2"
_HALF = "rollout.prompts_per_step=32"
_THREE_QUARTERS = "rollout.prompts_per_step=48"
_NARROW = "engine.max_running_requests=64"
_RESUME = "rollout.on_update=resume"
# Fitted runs are between the others: the speed of a machine changes over minutes
PLAN = (
    PlannedRun("alone", (), True),
    PlannedRun("wait1", (ONE_AHEAD,), True),
    PlannedRun("narrow", (_NARROW,), True),
    PlannedRun("resume1", (ONE_AHEAD, _RESUME), True),
    PlannedRun("most-wait1", (_THREE_QUARTERS, ONE_AHEAD)),
    PlannedRun("half-wait1", (_HALF, ONE_AHEAD), True),
    PlannedRun("resume2", (_TWO_AHEAD, _RESUME)),
    PlannedRun("half", (_HALF,), True),
    PlannedRun("narrow-wait1", (_NARROW, ONE_AHEAD)),
)


def measure(
    directory: Path, num_rounds: int, num_steps: int, log: Callable[[str], None]
) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """Train the planned runs one after the other, unless their directories exist.

    Each round trains all of them with another seed. Returns those to fit and the others. Raises
    `CannotFit` for a run that fails, or has failed.
    """
    fitted_runs: list[MeasuredRun] = []
    other_runs: list[MeasuredRun] = []
    for plan in (plan.with_seed(seed) for seed in range(num_rounds) for plan in PLAN):
        train_once(directory, plan, num_steps, log)
        runs = fitted_runs if plan.is_fitted else other_runs
        runs.append(read_run(directory / plan.name))
    return fitted_runs, other_runs


def train_once(
    directory: Path, plan: PlannedRun, num_steps: int, log: Callable[[str], None]
) -> None:
    """Train a planned run unless its directory exists.

    Raises `CannotFit` for a run that fails, and for a directory of a run that has failed or has
    another number of steps.
    """
    run = directory / plan.name
    if not run.exists():
        log(f"training {run}; load average before it: {os.getloadavg()[0]:.1f}")
        train(directory, plan, num_steps)
    require_steps(run, num_steps)


def require_steps(run: Path, num_steps: int) -> None:
    """Raise `CannotFit` unless the metrics of a run have so many steps."""
    count = count_steps(run)
    if count != num_steps:
        raise CannotFit(
            f"{run} has {count} steps instead of {num_steps}. Remove it, and start again"
        )


def count_steps(run: Path) -> int:
    """Return the last step in the metrics of a run."""
    return max((int(record["step"] or 0) for record in read_metrics(run)), default=0)


def train(directory: Path, plan: PlannedRun, num_steps: int) -> None:
    """Train a planned run. Raises `CannotFit` if it fails, and `subprocess.TimeoutExpired`."""
    directory.mkdir(parents=True, exist_ok=True)
    log_file = directory / f"{plan.name}.log"
    with log_file.open("w") as output:
        result = subprocess.run(
            command_of(directory, plan, num_steps),
            env=environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=_RUN_SECONDS,
        )
    if result.returncode:
        raise CannotFit(
            f"the run {directory / plan.name} ended with code {result.returncode}: see {log_file}. "
            "Remove the directory of the run, and start again"
        )


def environment() -> dict[str, str]:
    """Return the environment of a run. Engine and trainer use one core each."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def command_of(directory: Path, plan: PlannedRun, num_steps: int) -> list[str]:
    """Return the command that trains a planned run."""
    return [
        *(sys.executable, str(_ROOT / "launch/train_rl.py")),
        *_SETTINGS,
        *plan.settings,
        f"train.total_steps={num_steps}",
        f"run.root={directory.resolve()}",
        f"run.name={plan.name}",
    ]
