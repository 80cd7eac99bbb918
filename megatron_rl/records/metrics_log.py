"""metrics.jsonl and TensorBoard, under the same names."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from types import TracebackType

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records.heat_maps import heat_maps, is_drawn, is_share
from megatron_rl.records.past_run import RunUnreadable, read_metrics
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.write_errors import WriteFailed, write_problem


class MetricsLog:
    """Appends one JSON object a step, flushed at once; numbers that are not finite are null. Raises
    `WriteFailed`.

    first_step: of a run that goes on; TensorBoard hides what was written before of it and of later
    ones.
    """

    def __init__(
        self, directory: RunDirectory, settings: LoggerSettings, first_step: int | None = None
    ) -> None:
        self._path = directory.metrics_file
        with self._explained():
            self._file = self._path.open("ab", buffering=0)
        self._writer = None
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

            self._writer = SummaryWriter(str(directory.tensorboard), purge_step=first_step)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        record = {"step": step} | {
            k: v if math.isfinite(v) else None for k, v in sorted(values.items())
        }
        with self._explained():
            self._append(json.dumps(record).encode() + b"\n")
            if self._writer is not None:
                for name, value in values.items():
                    if not is_share(name):
                        self._writer.add_scalar(name, value, step)
                if any(map(is_drawn, values)):
                    with contextlib.suppress(RunUnreadable):  # no picture of an old damaged line
                        for heat_map in heat_maps(read_metrics(self._path.parent)):
                            self._writer.add_image(heat_map.name, heat_map.image(), step)
                self._writer.flush()

    def close(self) -> None:
        """Harmless when nothing more can be written."""
        self._file.close()
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()

    def _append(self, line: bytes) -> None:
        """The whole line or nothing: half a line would make the file unreadable."""
        start = self._file.seek(0, 2)
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._file.fileno(), view) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(start)
            raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if (problem := write_problem(error, self._path)) is None:
                raise
            raise WriteFailed(problem) from error

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
