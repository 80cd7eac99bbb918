"""The main job as rank 0 sees it: a short loop of verbs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from megatron_rl.config.schema import EvalSettings, RolloutSettings, RunSettings, SyncSettings, TrainSettings
from megatron_rl.contracts.commands import Save, Train
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.plan import StepPlan
from megatron_rl.credit.account import token_usage
from megatron_rl.credit.assign import Credit
from megatron_rl.planning.step_plan import Planner
from megatron_rl.prompts.source import PromptSource
from megatron_rl.records.idle_steps import IdleSteps
from megatron_rl.records.records import Records
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.batch import RolloutStage
from megatron_rl.rollouts.evaluation import Evaluation
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.run.dispatch import Dispatcher
from megatron_rl.sync.sender import WeightSync
from megatron_rl.training.worker import TrainOutcome


class NonFiniteRun(Failure):
    """Too many consecutive steps met a NaN or Inf."""

    exit_code = ExitCode.NON_FINITE


@dataclass(frozen=True)
class Stages:
    """The stages of a step that rank 0 runs by itself."""

    prompts: PromptSource
    rollouts: RolloutStage
    credit: Credit
    planner: Planner
    evaluation: Evaluation


@dataclass
class Leader:
    """Rank 0's loop over the stages of a step. Everything collective is a command to `dispatcher`."""

    train: TrainSettings
    rollout: RolloutSettings
    eval: EvalSettings
    sync: SyncSettings
    run: RunSettings
    stages: Stages
    queue: RolloutQueue
    weights: WeightSync
    dispatcher: Dispatcher
    records: Records
    _accuracies: deque[float] = field(default_factory=deque)
    _nonfinite: int = 0
    _synced: bool = False
    _idle: IdleSteps = field(default_factory=IdleSteps)

    def lead(self) -> None:
        """Train to the end, save the weights if asked to and let every rank end."""
        with self._recorded(0) as values:
            self.send_weights(values)
            self.evaluate(0, values)
        for step in range(1, self.train.total_steps + 1):
            with self._recorded(step) as values:
                self.train_step(step, values)
                self.evaluate(step, values)
            if self._reached():
                break
        if self.run.save_weights:
            self.dispatcher.run(Save(str(self.records.directory.checkpoints / f"step-{step}")))
        self.dispatcher.finish()
        self.queue.stop()
        if summary := self._idle.summary():
            self.records.progress.say(summary)
        if self.eval.stop_at is not None and not self._reached():
            self.records.progress.say(
                f"warning: eval.stop_at={self.eval.stop_at:g} was not reached in {step} steps; the last "
                f"{min(len(self._accuracies), self.eval.stop_average)} evaluation(s) average {self._recent():.3f}"
            )

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Roll out, credit, plan, train, sync; adds the step's metrics to `values`."""
        watch = Stopwatch()
        with watch.stage("rollout"):
            batch = self.stages.rollouts.draw(f"step-{step}", self.stages.prompts.take(self.rollout.prompts_per_step))
        credited = self.stages.credit.assign(step, batch.groups)
        values |= batch.metrics() | credited.metrics()
        plan = self.stages.planner.plan(step, credited.rollouts, credited.advantages)
        outcome: TrainOutcome = self.dispatcher.run(Train(plan))
        values |= token_usage(batch.generated_tokens, plan, outcome.optimizer_steps)
        values |= outcome.metrics.values() | outcome.seconds | {"train/nonfinite": float(not outcome.finite)}
        self.queue.release(batch.group_ids)
        self._count_nonfinite(plan, outcome)
        self._synced = False
        with watch.stage("sync"):
            if self.sync.when == "step":
                self.send_weights(values)
        values |= watch.values()
        self.records.progress.step(step, values)
        if warning := self._idle.note(values):
            self.records.progress.say(warning)

    def send_weights(self, values: dict[str, float]) -> None:
        """Send the weights to every engine under the next version, unless they have them."""
        if self._synced:
            return
        command = self.weights.next_command()
        values |= self.dispatcher.run(command)
        if self.weights.audit_obstacle and command.version == 0:
            self.records.progress.say(f"weights are not audited by value: {self.weights.audit_obstacle}")
        self.queue.set_version(command.version)
        self._synced = True

    def evaluate(self, step: int, values: dict[str, float]) -> None:
        """Held-out pass@1, added to `values`, when it is due."""
        if not self._evaluation_due(step):
            return
        self.send_weights(values)
        watch = Stopwatch()
        with watch.stage("eval"), self.records.progress.during(f"evaluating after step {step}"):
            accuracy = self.stages.evaluation.measure(str(step))
        self._accuracies.append(accuracy.accuracy)
        values |= accuracy.metrics() | watch.seconds
        self.records.progress.say(f"step {step}: held-out accuracy {accuracy}")

    def _evaluation_due(self, step: int) -> bool:
        if step == self.train.total_steps:
            return True
        every = self.eval.every if step else 1
        return step >= self.eval.first and every > 0 and step % every == 0

    def _reached(self) -> bool:
        """Whether the mean accuracy of the last evaluations is what the run was to stop at."""
        if self.eval.stop_at is None or len(self._accuracies) < self.eval.stop_average:
            return False
        return self._recent() >= self.eval.stop_at

    def _recent(self) -> float:
        return fmean(list(self._accuracies)[-self.eval.stop_average :])

    def _count_nonfinite(self, plan: StepPlan, outcome: TrainOutcome) -> None:
        """Raise `NonFiniteRun` after too many steps in a row with a NaN or Inf; a step without rollouts is neither."""
        if plan.rollouts:
            self._nonfinite = 0 if outcome.finite else self._nonfinite + 1
        if outcome.finite:
            return
        where = self.records.directory.rollouts / f"nonfinite-step-{plan.step}"
        self.records.progress.say(
            f"step {plan.step}: NaN or Inf in loss or gradients; that optimizer step was applied on no rank and "
            f"the rest of the batch was left out; the batch is in {where}"
        )
        if self._nonfinite >= self.train.max_nonfinite_steps:
            raise NonFiniteRun(
                f"{self._nonfinite} steps in a row had NaN or Inf in loss or gradients "
                f"(train.max_nonfinite_steps={self.train.max_nonfinite_steps}); their batches: {where.parent}"
            )

    @contextlib.contextmanager
    def _recorded(self, step: int) -> Iterator[dict[str, float]]:
        """What a step measured is written even when the step fails."""
        values: dict[str, float] = {}
        try:
            yield values
        finally:
            self.records.log.write(step, values)
