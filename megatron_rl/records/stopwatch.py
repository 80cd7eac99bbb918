"""Where a step's time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch:
    """Collects `time/<stage>` in seconds for one step."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[f"time/{name}"] = (
                self.seconds.get(f"time/{name}", 0.0) + time.perf_counter() - start
            )

    def values(self) -> dict[str, float]:
        return {**self.seconds, "time/step": time.perf_counter() - self._start}
