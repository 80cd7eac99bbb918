"""Where rank 0 writes what happens: the run's directory, its metrics, and the lines a person reads."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory


@dataclass(frozen=True)
class Records:
    """The three of them, opened for one run."""

    directory: RunDirectory
    log: MetricsLog
    progress: Progress
