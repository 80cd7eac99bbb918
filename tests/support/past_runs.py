"""Directories of runs as a run leaves them, without a run."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.config.cli import compose
from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records.exit_record import write_exit_record
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory

SETTINGS = LoggerSettings(tensorboard=False, progress=False)


def write_run(
    overrides: Sequence[str],
    *,
    accuracies: Sequence[float] = (0.25, 0.5),
    code: int | None = 0,
    ranks: int = 1,
    clipped: float = 0.0,
    tokens: float = 1000.0,
) -> Path:
    """The directory of a run of these overrides, one step before each accuracy but the first. code:
    None leaves no exit record, as a killed run does. clipped: share of each step's tokens, on
    either side half. tokens: of a step."""
    directory = RunDirectory.create(compose(overrides), datetime.datetime(2025, 1, 2), ranks=ranks)
    with MetricsLog(directory, SETTINGS) as log:
        for step, accuracy in enumerate(accuracies):
            values = {
                "eval/accuracy": accuracy,
                "eval/accuracy_ci95": 0.125,
                "eval/parseable": 1.0,
                "time/eval": 2.0,
            }
            sides = {f"policy/clip_fraction_{side}": clipped / 2 for side in ("low", "high")}
            log.write(
                step,
                values | ({"rollout/tokens": tokens, "time/step": 5.0} | sides if step else {}),
            )
    if code is not None:
        write_exit_record(
            directory.path, code, "the run is complete" if code == 0 else "an engine died"
        )
    return directory.path
