"""Times the sections of a step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

# The sections of a step, in their order. True: every step that trains has it.
SECTIONS = {
    "rollout": True,
    "credit": False,
    "exchange": True,
    "old_policy": True,
    "measure_replay": False,
    "reference": False,
    "train": True,
    "account": False,
    "samples": False,
    "record": False,
    "next_rollouts": False,
    "sync": True,
}


class Stopwatch:
    """Measures the sections of one step, in seconds, as metrics `time/<section>`."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the duration of the body to `time/<name>`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            key = f"time/{name}"
            self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start

    def values(self) -> dict[str, float]:
        """The sections so far, and `time/step`: the seconds since this object was made."""
        return {**self.seconds, "time/step": time.perf_counter() - self._start}
