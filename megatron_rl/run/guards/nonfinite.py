"""Reacts to NaN and Inf in losses, gradients, weights and responses (`guard.nonfinite`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.progress import Progress
from megatron_rl.run.guards.trouble import StoppedByGuard, Trouble
from megatron_rl.training.worker import TrainOutcome


class NonFiniteRun(StoppedByGuard):
    """Raised after `train.max_nonfinite_steps` consecutive steps with a NaN or Inf."""


@dataclass
class NonFiniteGuard:
    """Counts consecutive steps with a NaN or Inf in the loss or the gradients.

    max_steps: train.max_nonfinite_steps. rollouts: the folder that holds their batches.
    action: guard.nonfinite. since: the first of these steps.
    """

    max_steps: int
    rollouts: Path
    progress: Progress
    action: Literal["skip", "rollback", "stop"] = "skip"
    count: int = 0
    since: int | None = None

    @property
    def checks_weights(self) -> bool:
        """True if every step looks for NaN in the weights."""
        return self.action != "skip"

    def observe(self, plan: StepPlan, outcome: TrainOutcome) -> Trouble | None:
        """Take a step. One without rollouts neither adds to the count nor resets it.

        Returns the reason for a rollback, None without one. Raises `NonFiniteRun`.
        """
        if plan.rollouts:
            self._count(plan.step, is_finite=outcome.finite)
        if not outcome.weights_finite:
            text = f"step {plan.step}: NaN or Inf in the weights"
            return self._react(text, first_step=plan.step)
        if outcome.finite:
            return None
        batch = self.rollouts / f"nonfinite-step-{plan.step}"
        self.progress.log(
            f"step {plan.step}: NaN or Inf in the loss or the gradients. No rank applied that "
            f"optimizer step, and the rest of the batch was skipped. The batch is in {batch}"
        )
        if self.count < self.max_steps and self.action != "stop":
            return None
        steps = "1 step" if self.count == 1 else f"{self.count} consecutive steps"
        text = (
            f"{steps} had NaN or Inf in the loss or the gradients "
            f"(train.max_nonfinite_steps={self.max_steps}). The batches are in {self.rollouts}"
        )
        first_step = plan.step if self.since is None else self.since
        return self._react(text, first_step=first_step, is_repeated=self.count > 1)

    def observe_responses(self, step: int, failure: Exception) -> Trouble | None:
        """Take a batch of which too many responses have NaN. Returns the reason for a rollback.

        step: the engines had the weights from before it, or newer ones. Returns None where the
        failure ends the run as without a guard. Raises `NonFiniteRun`.
        """
        if self.action == "skip":
            return None
        return self._react(str(failure), first_step=max(step - 1, 0), is_repeated=True)

    def reset(self) -> None:
        """Begin to count anew, after a rollback."""
        self.count = 0
        self.since = None

    def require_update(self) -> None:
        """Raise `NonFiniteRun` after a run without an update, if NaN or Inf is the cause."""
        if self.count:
            raise NonFiniteRun(
                f"every update had NaN or Inf in the loss or the gradients: the weights have not "
                f"changed. The batches are in {self.rollouts}. Try a lower optimizer.lr"
            )

    def _count(self, step: int, *, is_finite: bool) -> None:
        if is_finite:
            self.reset()
            return
        self.count += 1
        if self.since is None:
            self.since = step

    def _react(self, text: str, *, first_step: int, is_repeated: bool = False) -> Trouble:
        if self.action != "rollback":
            key = f" (guard.nonfinite={self.action})" if self.action == "stop" else ""
            raise NonFiniteRun(f"{text}{key}")
        return Trouble(text, first_step, is_repeated)
