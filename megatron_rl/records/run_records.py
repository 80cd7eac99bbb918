"""Everything that rank 0 writes about a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.run_directory import RunDirectory


class RunRecords:
    """The directory, the metrics and the progress lines of one run.

    `metrics` gets a record for each step. What belongs to no step, such as a checkpoint, is in the
    record of the next one.
    """

    def __init__(self, directory: RunDirectory, metrics: MetricsLog, progress: Progress) -> None:
        self.directory = directory
        self.metrics = metrics
        self.progress = progress
        self.pending_values: dict[str, float] = {}  # of the next record

    @contextlib.contextmanager
    def record(self, step: int) -> Iterator[dict[str, float]]:
        """Write the metrics that the body adds.

        A step that fails has a record, too, if it got as far as its own metrics.
        """
        earlier_values = self.pending_values
        self.pending_values = {}
        values = dict(earlier_values)
        try:
            yield values
        except BaseException:
            if values != earlier_values:
                self.write(step, values)
            raise
        self.write(step, values)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write one record."""
        self.metrics.write(step, values)
