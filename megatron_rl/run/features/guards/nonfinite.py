"""Reacts to NaN and Inf in losses, gradients, weights and responses (`guard.nonfinite`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.progress import Progress
from megatron_rl.run.features.guards.stopped_by_guard import StoppedByGuard
from megatron_rl.training.worker import TrainOutcome

# One batch may have NaN by chance. Consecutive ones have a cause that training does not remove.
_MAX_STEPS = 3


@dataclass
class NonFiniteGuard:
    """Counts consecutive steps with a NaN or Inf in the loss or the gradients.

    rollouts: the folder that holds their batches. action: guard.nonfinite. since: the first of
    these steps.
    """

    rollouts: Path
    progress: Progress
    action: Literal["skip", "stop"] = "skip"
    count: int = 0
    since: int | None = None

    @property
    def checks_weights(self) -> bool:
        """True if every step looks for NaN in the weights."""
        return self.action == "stop"

    def observe(self, plan: StepPlan, outcome: TrainOutcome) -> None:
        """Take a step. One without rollouts neither adds to the count nor resets it.

        Raises `StoppedByGuard`.
        """
        if plan.rollouts:
            self._count(plan.step, is_finite=outcome.finite)
        if not outcome.weights_finite:
            text = f"step {plan.step}: NaN or Inf in the weights (guard.nonfinite=stop)"
            raise StoppedByGuard(text, plan.step)
        if outcome.finite:
            return
        batch = self.rollouts / f"nonfinite-step-{plan.step}"
        self.progress.log(
            f"step {plan.step}: NaN or Inf in the loss or the gradients. No rank applied that "
            f"optimizer step, and the rest of the batch was skipped. The batch is in {batch}"
        )
        if self.count < _MAX_STEPS and self.action != "stop":
            return
        steps = "1 step" if self.count == 1 else f"{self.count} consecutive steps"
        text = (
            f"{steps} had NaN or Inf in the loss or the gradients "
            f"(guard.nonfinite={self.action}). The batches are in {self.rollouts}"
        )
        raise StoppedByGuard(text, plan.step if self.since is None else self.since)

    def observe_responses(self, step: int, failure: Exception) -> None:
        """Take a batch in which too many responses have NaN.

        step: the engines had the weights from before it, or newer ones. Raises `StoppedByGuard`
        with guard.nonfinite=stop. Otherwise the failure ends the run.
        """
        if self.action == "stop":
            text = f"{failure} (guard.nonfinite=stop)"
            raise StoppedByGuard(text, max(step - 1, 0)) from failure

    def require_update(self) -> None:
        """Raise `StoppedByGuard` after a run without an update, if NaN or Inf is the cause."""
        if self.count:
            raise StoppedByGuard(
                f"every update had NaN or Inf in the loss or the gradients: the weights have not "
                f"changed. The batches are in {self.rollouts}. Try a lower optimizer.lr",
                0,
            )

    def _count(self, step: int, *, is_finite: bool) -> None:
        if is_finite:
            self.count = 0
            self.since = None
            return
        self.count += 1
        self.since = step if self.since is None else self.since
