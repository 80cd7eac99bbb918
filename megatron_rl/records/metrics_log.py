"""Writes metrics to metrics.jsonl, and passes them on."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.effective_time import EFFECTIVE_TIME, EffectiveTime
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.write_errors import write_problem

# Gets the step and the metrics of each record
Reader = Callable[[int, Mapping[str, float]], None]


class MetricsLog:
    """Appends one JSON object for each step. Non-finite numbers become null.

    effective_time: adds `run/effective_time` to each record. Raises `Failure` when the file cannot
    be written.
    """

    def __init__(
        self, directory: RunDirectory, effective_time: EffectiveTime | None = None
    ) -> None:
        self._path = directory.metrics_file
        with self._explained_write_errors():
            self._file = self._path.open("ab", buffering=0)
        self._readers: list[Reader] = []
        self._effective_time = effective_time

    def add_reader(self, read: Reader) -> None:
        """Call `read` with each record that is written. An OSError ends the run."""
        self._readers.append(read)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Append the metrics of one step and flush them. Raises `Failure`."""
        if self._effective_time is not None:
            values = {**values, EFFECTIVE_TIME: self._effective_time.after(step, values)}
        record: dict[str, float | None] = {"step": step}
        for name, value in sorted(values.items()):
            record[name] = value if math.isfinite(value) else None
        with self._explained_write_errors():
            self._append(json.dumps(record).encode() + b"\n")
            for read in self._readers:
                read(step, values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _append(self, line: bytes) -> None:
        """Write the complete line, or nothing: half a line would make the file unreadable."""
        start = self._file.seek(0, os.SEEK_END)
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._file.fileno(), view) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise

    @contextlib.contextmanager
    def _explained_write_errors(self) -> Iterator[None]:
        """Turn errors of the disk into `Failure`."""
        try:
            yield
        except OSError as error:
            problem = write_problem(error, self._path)
            if problem is None:
                raise
            raise Failure(problem, ExitCode.CANNOT_WRITE) from error

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
