"""Writes directories as runs leave them, without a run."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.schema import Configuration
from megatron_rl.records.exit_record import write_exit_record
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory, run_directory_path
from tests.support.configurations import configuration_of


def make_run_directory(configuration: Configuration, *, ranks: int = 1) -> RunDirectory:
    """Make the directory of a new run, as rank 0 does."""
    path = run_directory_path(configuration.run, datetime.datetime(2025, 1, 2))
    directory = RunDirectory(path)
    directory.create(configuration, ranks=ranks)
    return directory


def write_run(
    overrides: Sequence[str],
    *,
    accuracies: Sequence[float] = (0.25, 0.5),
    code: int | None = 0,
    ranks: int = 1,
    clipped_share: float = 0.0,
    tokens: float = 1000.0,
) -> Path:
    """Write the directory of a run with these overrides, and return its path.

    accuracies: one for step 0 and one after each step. code: of exit.json; None writes none, as
    for a killed run. clipped_share: the share of clipped tokens, half of it on either side.
    tokens: the tokens of a step.
    """
    directory = make_run_directory(configuration_of(overrides), ranks=ranks)
    step_values = {
        "rollout/tokens": tokens,
        "time/step": 5.0,
        "policy/clip_fraction_low": clipped_share / 2,
        "policy/clip_fraction_high": clipped_share / 2,
    }
    with MetricsLog(directory) as metrics:
        for step, accuracy in enumerate(accuracies):
            values = {
                "eval/accuracy": accuracy,
                "eval/accuracy_ci95": 0.125,
                "eval/parseable": 1.0,
                "time/eval": 2.0,
            }
            metrics.write(step, values | step_values if step else values)
    if code is not None:
        reason = "the run is complete" if code == 0 else "an engine died"
        write_exit_record(directory.path, code, reason)
    return directory.path
