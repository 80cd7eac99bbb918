"""Ends a run whose updates keep meeting NaN or Inf."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.progress import Progress


class NonFiniteRun(Failure):
    """Raised after `train.max_nonfinite_steps` consecutive steps with a NaN or Inf."""

    exit_code = ExitCode.NON_FINITE


@dataclass
class NonFiniteGuard:
    """Counts consecutive steps with a NaN or Inf in the loss or the gradients.

    max_steps: train.max_nonfinite_steps. rollouts: the folder that holds their batches.
    """

    max_steps: int
    rollouts: Path
    progress: Progress
    count: int = 0

    def check(self, plan: StepPlan, *, finite: bool) -> None:
        """Count a step. A step without rollouts neither adds to the count nor resets it.

        Raises `NonFiniteRun`.
        """
        if plan.rollouts:
            self.count = 0 if finite else self.count + 1
        if finite:
            return
        batch = self.rollouts / f"nonfinite-step-{plan.step}"
        self.progress.log(
            f"step {plan.step}: NaN or Inf in the loss or the gradients. No rank applied that "
            f"optimizer step, and the rest of the batch was skipped. The batch is in {batch}"
        )
        if self.count >= self.max_steps:
            raise NonFiniteRun(
                f"{self.count} consecutive steps had NaN or Inf in the loss or the gradients "
                f"(train.max_nonfinite_steps={self.max_steps}). The batches are in {self.rollouts}"
            )

    def require_update(self) -> None:
        """Raise `NonFiniteRun` after a run without an update, if NaN or Inf is the cause."""
        if self.count:
            raise NonFiniteRun(
                f"every update had NaN or Inf in the loss or the gradients: the weights have not "
                f"changed. The batches are in {self.rollouts}. Try a lower optimizer.lr"
            )
