"""metrics.jsonl and TensorBoard, under the same names."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType


class MetricsLog:
    """Appends one record a step. tensorboard None: no event files."""

    def __init__(self, metrics_file: Path, tensorboard: Path | None) -> None:
        self._file = metrics_file.open("a", encoding="utf-8")
        self._writer = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

            self._writer = SummaryWriter(str(tensorboard))

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
