"""metrics.jsonl and TensorBoard, under the same names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import TracebackType

from megatron_rl.config.schema import LoggerSettings
from megatron_rl.records.run_directory import RunDirectory


class MetricsLog:
    """Appends one JSON object a step, flushed at once; numbers that are not finite are null."""

    def __init__(self, directory: RunDirectory, settings: LoggerSettings) -> None:
        self._file = directory.metrics_file.open("a", encoding="utf-8")
        self._writer = None
        if settings.tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

            self._writer = SummaryWriter(str(directory.tensorboard))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        record = {"step": step} | {k: v if math.isfinite(v) else None for k, v in sorted(values.items())}
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
