"""Writes metrics to metrics.jsonl, TensorBoard and trackers, under the same names."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.effective_time import EFFECTIVE_TIME, EffectiveTime
from megatron_rl.records.heat_maps import HeatMaps, is_expert_share, is_heat_map_metric
from megatron_rl.records.past_run import RunUnreadable, iterate_metrics
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.write_errors import write_problem

# Steps in a heat map of TensorBoard, which stores each picture
_MAX_COLUMNS = 256


# Gets the step and the metrics of each record
Reader = Callable[[int, Mapping[str, float]], None]


class MetricsLog:
    """Appends one JSON object for each step. Non-finite numbers become null.

    first_step: the first step of a resumed run. TensorBoard then hides the older records of this
    and later steps. effective_time: adds `run/effective_time` to each record. Raises `Failure` when
    a file cannot be written.
    """

    def __init__(
        self,
        directory: RunDirectory,
        settings: LoggerSettings,
        first_step: int | None = None,
        effective_time: EffectiveTime | None = None,
    ) -> None:
        self._path = directory.metrics_file
        with self._explained_write_errors():
            self._file = self._path.open("ab", buffering=0)
        self._maps: HeatMaps | None = None
        self._readers: list[Reader] = []
        self._effective_time = effective_time
        self._writer = None
        if settings.tensorboard:
            # This import is slow, and TensorBoard is optional
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(directory.tensorboard), purge_step=first_step)

    def add_reader(self, read: Reader) -> None:
        """Call `read` with each record that is written. It must not raise."""
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
            self._write_tensorboard(step, values, record)
        for read in self._readers:
            read(step, values)

    def close(self) -> None:
        """Close both files. Errors of TensorBoard are ignored."""
        self._file.close()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

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

    def _write_tensorboard(
        self, step: int, values: Mapping[str, float], record: dict[str, float | None]
    ) -> None:
        if self._writer is None:
            return
        for name, value in values.items():
            if not is_expert_share(name):
                self._writer.add_scalar(name, value, step)
        if any(map(is_heat_map_metric, values)):
            for heat_map in self._maps_with(record).maps():
                self._writer.add_image(heat_map.name, heat_map.image(), step)
        self._writer.flush()

    def _maps_with(self, record: dict[str, float | None]) -> HeatMaps:
        """The heat maps of all records up to this one, which was just written."""
        if self._maps is None:
            self._maps = HeatMaps(max_columns=_MAX_COLUMNS)
            # A damaged line of an earlier step costs the columns after it, not the run
            with contextlib.suppress(RunUnreadable):
                for earlier_record in iterate_metrics(self._path.parent):
                    self._maps.add(earlier_record)
                return self._maps
        self._maps.add(record)
        return self._maps

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
