"""Rolls a run back to a good checkpoint, in place, and not too often (`guard.max_rollbacks`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.config.schema import GuardSettings
from megatron_rl.contracts.run_state import RollbackRecord, RunState
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.guards.trouble import StoppedByGuard, Trouble


@dataclass
class Rollbacks:
    """Rank 0's part in rollbacks.

    checkpoints: None for a loop that saves none, where rules refuse guards that roll back.
    records: those of the last guard.rollback_window steps, and the last one.
    """

    settings: GuardSettings
    checkpoints: CheckpointManager | None
    log: Callable[[str], None]
    records: tuple[RollbackRecord, ...] = ()

    def roll_back(self, step: int, trouble: Trouble) -> RunState:
        """Load the last good checkpoint on all ranks, and return its state.

        A good checkpoint is from before the trouble. After repeated trouble with the present
        weights it also has fewer updates than they. Raises `StoppedByGuard` without one, and
        instead of too many rollbacks.
        """
        assert self.checkpoints is not None, "the settings are checked"
        recent = self._recent(step)
        if len(recent) >= self.settings.max_rollbacks:
            raise StoppedByGuard(
                f"{trouble.text}. The run has rolled back {len(recent)} times in the last "
                f"guard.rollback_window={self.settings.rollback_window} steps "
                f"(guard.max_rollbacks={self.settings.max_rollbacks})"
            )
        present_steps = self.checkpoints.optimizer_steps()
        needs_others = trouble.is_repeated or self._was_in_vain(present_steps)
        limit = present_steps - 1 if needs_others else present_steps
        point = self.checkpoints.roll_back(trouble.first_step, limit) if limit >= 0 else None
        if point is None or point.state is None:
            problems = "" if point is None else " | ".join(point.damaged_checkpoints)
            raise StoppedByGuard(
                f"{trouble.text}. There is no checkpoint from before step {trouble.first_step}"
                f"{' with other weights than the present ones' if needs_others else ''} to roll "
                f"back to{f' ({problems})' if problems else ''}. Lower run.checkpoint_every, or "
                "raise run.keep_checkpoints"
            )
        state = point.state
        record = RollbackRecord(step=step, target=state.step, optimizer_steps=state.optimizer_steps)
        self.records = (*recent, record)
        for problem in point.damaged_checkpoints:
            self.log(f"warning: skipping a damaged checkpoint: {problem}")
        return state

    def _recent(self, step: int) -> tuple[RollbackRecord, ...]:
        first_step = step - self.settings.rollback_window
        return tuple(record for record in self.records if record.step > first_step)

    def _was_in_vain(self, optimizer_steps: int) -> bool:
        """True if no update was applied since the last rollback."""
        return bool(self.records) and self.records[-1].optimizer_steps == optimizer_steps
