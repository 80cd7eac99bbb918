"""Loads an earlier checkpoint of the run in place, on all ranks.

A kill at any moment leaves the run to resume from a good checkpoint, or from one whose state lets
the guards roll back again: newer checkpoints lose their names before the first tensor is loaded
(tests/distributed/test_rollbacks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.commands import RollBack
from megatron_rl.mcore.job import Job
from megatron_rl.run.checkpoints.resume import ResumePoint, newest_complete
from megatron_rl.run.checkpoints.state_file import read_state
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of
from megatron_rl.training.worker import Worker


@dataclass(frozen=True)
class CheckpointLoader:
    """One rank's part in a rollback."""

    worker: Worker
    store: CheckpointStore
    job: Job

    def roll_back(self, command: RollBack) -> ResumePoint:
        """Load the checkpoint that the command describes (a collective).

        Returns a point without a checkpoint, and changes nothing, if there is none. Files are
        compared with their hashes first. Raises `CheckpointUnusable`.
        """
        candidates = self._candidates(command) if self.job.rank == 0 else []
        checkpoint, problems = newest_complete(candidates, self.job)
        if checkpoint is None:
            return ResumePoint(damaged_checkpoints=problems)
        point = ResumePoint(checkpoint, read_state(checkpoint), problems)
        if self.job.rank == 0:
            self.store.retire_newer(step_of(checkpoint) or 0)
        self.worker.forget_step()
        point.load(self.worker)
        return point

    def _candidates(self, command: RollBack) -> list[Path]:
        """The checkpoints from before the trouble, newest first."""
        return [
            checkpoint
            for checkpoint in self.store.checkpoints()
            if (step_of(checkpoint) or 0) < command.first_step
            and _optimizer_steps(checkpoint) <= command.max_optimizer_steps
        ]


def _optimizer_steps(checkpoint: Path) -> int:
    """The optimizer steps before a checkpoint. 0 for a damaged one, which is reported later."""
    try:
        return read_state(checkpoint).optimizer_steps
    except ValueError:
        return 0
