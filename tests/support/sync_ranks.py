"""Two ranks of a trainer that send weights to engines, and may die meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from sglang_bridge.server.ports import choose_port
from tests.chaos import sync_rank
from tests.chaos.sync_rank import Job
from tests.support.forks import FORKS


class Ranks:
    """Two ranks. One that ends early takes the other with it, as torchrun does.

    job: the fields of `Job`.
    """

    def __init__(self, folder: Path, **job: Any) -> None:
        self.lines: list[str] = []
        port = choose_port("127.0.0.1")
        data = msgspec.json.encode(Job(port=port, **job))
        self._outputs = [folder / f"job-{port}-{rank}.txt" for rank in (0, 1)]
        self._processes = [
            FORKS.Process(target=sync_rank.run, args=(data, rank, output), daemon=True)
            for rank, output in enumerate(self._outputs)
        ]
        for process in self._processes:
            process.start()

    def wait(self, seconds: float = 200) -> None:
        """Wait until both have ended."""
        deadline = time.monotonic() + seconds
        try:
            while any(process.exitcode is None for process in self._processes):
                assert time.monotonic() < deadline, "a rank hangs"
                if any(process.exitcode not in (None, 0) for process in self._processes):
                    self._kill()
                time.sleep(0.02)
        finally:
            self._kill()
        for output in self._outputs:
            self.lines += output.read_text().splitlines() if output.exists() else []

    def _kill(self) -> None:
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
            process.join(10)

    def time_of(self, start: str) -> float:
        """The time that the line with this start ends with."""
        (line,) = [line for line in self.lines if line.startswith(start)]
        return float(line.split()[-1])

    @property
    def failures(self) -> list[str]:
        """The lines of rank 0 about engines."""
        return [line for line in self.lines if line.startswith("FAILED")]
