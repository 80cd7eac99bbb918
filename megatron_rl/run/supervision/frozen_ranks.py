"""Detects ranks of this node that are stopped (SIGSTOP): the others would wait for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.engines.node.frozen_processes import FrozenProcesses, ProcessFrozen
from megatron_rl.run.supervision.local_ranks import LocalRanks
from sglang_bridge.server.process_table import kill, process_tree


class RankFrozen(Failure):
    """Another rank of this node was stopped and not continued."""

    exit_code = ExitCode.PEER_FAILED

    def __init__(self, text: str, pids: Sequence[int]) -> None:
        super().__init__(text)
        self._processes = [process for pid in pids for process in process_tree(pid)[:1]]

    def kill_processes(self) -> None:
        """Kill the stopped rank. It cannot end itself, and torchrun would wait half a minute."""
        kill(self._processes)


class FrozenRanks:
    """Watches the other ranks of this node. Each rank watches its engines and collector itself."""

    def __init__(self, ranks: LocalRanks, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ranks = ranks
        self._frozen_processes = FrozenProcesses(generations=0, clock=clock)

    def check(self) -> None:
        """Look for stopped ranks. Raises `RankFrozen`."""
        pids = self._ranks.other_pids()
        names = {f"rank {rank} of the training": pid for rank, pid in pids.items()}
        try:
            self._frozen_processes.check(names)
        except ProcessFrozen as error:
            raise RankFrozen(str(error), error.pids) from error
