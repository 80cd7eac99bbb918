"""The ranks that torchrun started on this node, as the process table shows them."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_bridge.server.process_table import children, lives, starting, variable

_START_SECONDS = 5.0


@dataclass(frozen=True)
class LocalRanks:
    """This rank among those of its node. agent: process id of their torchrun, 0 where none started
    this process.

    error_file: where torchrun looks for what ended this rank.
    """

    rank: int = 0
    local_rank: int = 0
    count: int = 1
    agent: int = 0
    error_file: Path | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LocalRanks:
        """As torchrun tells it to this process."""
        rank, under_torchrun = (
            int(environment.get("RANK", "0")),
            "TORCHELASTIC_RUN_ID" in environment,
        )
        if not under_torchrun:
            return cls(rank=rank)
        file = environment.get("TORCHELASTIC_ERROR_FILE", os.devnull)
        return cls(
            rank=rank,
            local_rank=int(environment["LOCAL_RANK"]),
            count=int(environment["LOCAL_WORLD_SIZE"]),
            agent=os.getppid(),
            error_file=None if file == os.devnull else Path(file),
        )

    @property
    def orphaned(self) -> bool:
        """Whether torchrun is gone, or about to be: its last threads outlive its first."""
        return self.agent != 0 and (os.getppid() != self.agent or not lives(self.agent))

    def living(self) -> set[int]:
        """Ranks of this node that live, this one among them.

        One that is just being started is waited for.
        """
        if not self.agent:
            return {self.rank}
        deadline = time.monotonic() + _START_SECONDS
        while any(map(starting, processes := children(self.agent))) and time.monotonic() < deadline:
            time.sleep(0.01)
        ranks = (variable(pid, "RANK") for pid in processes if lives(pid))
        return {self.rank, *(int(rank) for rank in ranks if rank is not None)}

    def dead(self) -> list[int]:
        """Ranks of this node that have ended. Nothing is known once torchrun is gone."""
        if not self.agent or self.orphaned:
            return []
        first = self.rank - self.local_rank
        missing = sorted(set(range(first, first + self.count)) - self.living())
        return [] if self.orphaned else missing

    def leads(self) -> bool:
        """Whether this is the lowest rank of the node that lives."""
        return self.orphaned or min(self.living()) == self.rank

    def has_spoken(self) -> bool:
        """Whether a rank of this node has said what ended it, this one or another."""
        if self.error_file is None:
            return False
        folder, name = self.error_file.parent.parent, self.error_file.name
        return any((folder / str(local) / name).is_file() for local in range(self.count))
