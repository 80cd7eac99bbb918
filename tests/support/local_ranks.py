"""Ranks that stand in for those that torchrun starts: children of this process with torchrun's
environment.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.run.supervision.local_ranks import LocalRanks


def environment(rank: int, count: int, folder: Path) -> dict[str, str]:
    """What torchrun tells a rank of one node."""
    (folder / str(rank)).mkdir(parents=True, exist_ok=True)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json"),
    }


@contextlib.contextmanager
def ranks(
    count: int, folder: Path, code: str = "import time; time.sleep(60)"
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `code` in `count` processes, each a rank; they are killed at the end."""
    root = Path(__file__).resolve().parents[2]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | environment(rank, count, folder) | {"PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        yield jobs
    finally:
        for job in jobs:
            job.kill()
            job.communicate()


class Known(LocalRanks):
    """Siblings whose deaths a test decides."""

    def __init__(
        self,
        rank: int = 0,
        count: int = 2,
        *,
        dead: tuple[int, ...] = (),
        folder: Path | None = None,
    ) -> None:
        file = folder / str(rank) / "error.json" if folder is not None else None
        super().__init__(rank=rank, local_rank=rank, count=count, agent=1, error_file=file)
        object.__setattr__(self, "gone", set(dead))
        object.__setattr__(self, "without_torchrun", False)

    @property
    def orphaned(self) -> bool:
        return bool(self.__dict__["without_torchrun"])

    def living(self) -> set[int]:
        return set(range(self.count)) - self.__dict__["gone"]
