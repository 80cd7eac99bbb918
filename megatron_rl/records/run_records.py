"""Everything that rank 0 writes about a run."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory


@dataclass(frozen=True)
class RunRecords:
    """The directory, the metrics and the progress lines of one run."""

    directory: RunDirectory
    metrics: MetricsLog
    progress: Progress
