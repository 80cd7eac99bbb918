"""Child processes with torchrun's environment, and ranks whose deaths a test decides."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.run.supervision.local_ranks import LocalRanks

ROOT = Path(__file__).resolve().parents[2]
_SLEEP = "import time; time.sleep(60)"


def torchrun_environment(rank: int, count: int, folder: Path) -> dict[str, str]:
    """The variables that torchrun sets for one rank of a node."""
    (folder / str(rank)).mkdir(parents=True, exist_ok=True)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": str(folder / str(rank) / "error.json"),
    }


@contextlib.contextmanager
def start_ranks(
    count: int, folder: Path, code: str = _SLEEP
) -> Iterator[list[subprocess.Popen[str]]]:
    """Run `code` in `count` processes, one for each rank. They are killed at the end."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | torchrun_environment(rank, count, folder) | {"PYTHONPATH": str(ROOT)},
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


class FakeLocalRanks(LocalRanks):
    """Local ranks whose deaths a test decides.

    dead: the dead ranks. torchrun_is_dead: their torchrun was killed.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 2,
        *,
        dead: tuple[int, ...] = (),
        torchrun_is_dead: bool = False,
        folder: Path | None = None,
    ) -> None:
        file = folder / str(rank) / "error.json" if folder is not None else None
        super().__init__(rank=rank, local_rank=rank, count=count, agent=1, error_file=file)
        object.__setattr__(self, "dead", set(dead))
        object.__setattr__(self, "torchrun_is_dead", torchrun_is_dead)

    @property
    def is_orphaned(self) -> bool:
        return bool(self.__dict__["torchrun_is_dead"])

    def living_ranks(self) -> set[int]:
        return set(range(self.count)) - self.__dict__["dead"]
