"""A step that every rank has trained."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.account import account, demonstrations, usage
from megatron_rl.credit.assign import BatchCredit
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.training.worker import TrainOutcome


@dataclass(frozen=True)
class TrainedStep:
    """The batch of a step, what it was credited with, who trained what, and the outcome."""

    batch: RolloutBatch
    credit: BatchCredit
    plan: StepPlan
    outcome: TrainOutcome

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the ranks, and the account of the tokens."""
        steps = self.outcome.optimizer_steps
        tokens = self.batch.generated_tokens
        values = usage(self.plan, steps, generated_tokens=tokens)
        values |= demonstrations(self.plan, steps)
        values |= account(
            self.batch.groups,
            self.credit,
            self.plan,
            steps,
            generated_tokens=tokens,
            stopped_groups=self.batch.stopped_groups,
            surplus_groups=self.batch.surplus_groups,
            unused_tokens=self.batch.unused_tokens,
        )
        values |= self.outcome.metrics.values() | self.outcome.seconds
        values["train/nonfinite"] = float(not self.outcome.finite)
        return values
