"""Finds the living ranks that torchrun started on this node."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sglang_bridge.server.process_table import (
    children,
    environment_variable,
    is_alive,
    is_starting,
)

_START_SECONDS = 5.0


@dataclass(frozen=True)
class LocalRanks:
    """This rank among the ranks of its node.

    count: the number of ranks of the node. agent: the process id of their torchrun, 0 without
    torchrun. error_file: the file in which torchrun looks for this rank's error.
    """

    rank: int = 0
    local_rank: int = 0
    count: int = 1
    agent: int = 0
    error_file: Path | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> LocalRanks:
        """Read the variables that torchrun sets."""
        rank = int(environment.get("RANK", "0"))
        if "TORCHELASTIC_RUN_ID" not in environment:
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
    def is_orphaned(self) -> bool:
        """True once torchrun is gone, or ends: its last threads outlive its first one."""
        return self.agent != 0 and (os.getppid() != self.agent or not is_alive(self.agent))

    def living_ranks(self) -> set[int]:
        """The living ranks of this node, this one included.

        It waits for ranks that are just being started.
        """
        if not self.agent:
            return {self.rank}
        deadline = time.monotonic() + _START_SECONDS
        processes = children(self.agent)
        while any(map(is_starting, processes)) and time.monotonic() < deadline:
            time.sleep(0.01)
            processes = children(self.agent)
        ranks = [environment_variable(pid, "RANK") for pid in processes if is_alive(pid)]
        return {self.rank, *(int(rank) for rank in ranks if rank is not None)}

    def other_pids(self) -> dict[int, int]:
        """The process id of every other living rank of this node, by rank."""
        pids: dict[int, int] = {}
        for pid in children(self.agent) if self.agent else []:
            rank = environment_variable(pid, "RANK")
            if rank is not None and int(rank) != self.rank:
                pids[int(rank)] = pid
        return pids

    def dead_ranks(self) -> list[int]:
        """The ranks of this node that have ended. Empty once torchrun is gone."""
        if not self.agent or self.is_orphaned:
            return []
        first = self.rank - self.local_rank
        missing = sorted(set(range(first, first + self.count)) - self.living_ranks())
        return [] if self.is_orphaned else missing

    def is_lowest_living(self) -> bool:
        """True for the lowest living rank of the node, and for every rank without torchrun."""
        return self.is_orphaned or min(self.living_ranks()) == self.rank

    def has_report(self) -> bool:
        """True once a rank of this node has reported the cause of its end."""
        if self.error_file is None:
            return False
        folder = self.error_file.parent.parent
        name = self.error_file.name
        return any((folder / str(local) / name).is_file() for local in range(self.count))
