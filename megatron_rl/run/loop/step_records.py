"""The records of steps in metrics.jsonl."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

from megatron_rl.records.run_records import RunRecords


class StepRecords:
    """Writes a record for each step.

    What belongs to no step, such as a checkpoint, is in the record of the next one.
    """

    def __init__(self, records: RunRecords) -> None:
        self.progress = records.progress
        self.directory = records.directory
        self.pending_values: dict[str, float] = {}  # of the next record
        self._metrics = records.metrics

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
        self._metrics.write(step, values)
