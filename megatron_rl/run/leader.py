"""The main job as rank 0 sees it: a short loop of verbs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Protocol

from megatron_rl.config.schema import (
    EvalSettings,
    RolloutSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from megatron_rl.contracts.commands import Save, Train
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.run_state import LoopState, SelectorState
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.account import account, usage, warning_of
from megatron_rl.credit.assign import Credit
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.run.alarms import ZeroVarianceBalanceAlarm
from megatron_rl.run.alarms import UnchangedWeightsAlarm
from megatron_rl.records.run_records import RunRecords
from megatron_rl.run.alarms import SelectionAlarm
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.evaluation import Evaluation
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.curriculum import Curriculum
from megatron_rl.run.stopping import ended_by, reached
from megatron_rl.run.supervision.stop_request import StepAborted
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.worker import TrainOutcome


class Rollouts(Protocol):
    """Where a step's judged groups come from, and how far a run is in choosing them."""

    def draw(self, step: int) -> RolloutBatch: ...

    def state(self) -> SelectorState: ...

    def restore(self, state: SelectorState) -> None: ...

    def widen(self) -> None: ...


class Queue(Protocol):
    """Who holds the rollouts that were drawn."""

    def release(self, group_ids: Sequence[str]) -> None: ...

    def set_version(self, version: int) -> None: ...

    def stop(self) -> None: ...


class NonFiniteRun(Failure):
    """Too many consecutive steps met a NaN or Inf."""

    exit_code = ExitCode.NON_FINITE


@dataclass(frozen=True)
class Stages:
    """The stages of a step that rank 0 runs by itself."""

    rollouts: Rollouts
    credit: Credit
    planner: StepPlanner
    evaluation: Evaluation | None


@dataclass
class Leader:
    """Rank 0's loop over the stages of a step.

    Everything collective is a command to `dispatcher`.
    """

    train: TrainSettings
    rollout: RolloutSettings
    eval: EvalSettings
    sync: SyncSettings
    run: RunSettings
    stages: Stages
    queue: Queue
    weights: WeightSync | None
    dispatcher: Dispatcher
    records: RunRecords
    keeper: CheckpointManager | None = None
    course: Curriculum | None = None
    _first_step: int = 1
    _goes_on: bool = False
    _pending: dict[str, float] = field(default_factory=dict)
    _accuracies: deque[float] = field(default_factory=deque)
    _nonfinite: int = 0
    _synced: bool = False
    _told_obstacle: bool = False
    _idle: UnchangedWeightsAlarm = field(default_factory=UnchangedWeightsAlarm)
    _balance: ZeroVarianceBalanceAlarm = field(default_factory=ZeroVarianceBalanceAlarm)
    _selection: SelectionAlarm = field(default_factory=SelectionAlarm)

    def lead(self) -> None:
        """Train to the end, save the weights if asked to and let every rank end."""
        step = self._first_step - 1
        if key := self._over(step):
            self.records.progress.log(
                f"nothing is left to train after step {step}: raise {key} to train further"
            )
        else:
            self._enter(self._first_step)
            self._begin()
            self._leave_if_told(step)
        while not self._over(step):
            step += 1
            with self._in_time(step), self._recorded(step) as values:
                self._enter(step)
                self.train_step(step, values)
                self.evaluate(step, values)
                self._note(values)
            self._keep(step, last=bool(self._over(step)))
        self.save_weights(step)
        self.dispatcher.finish()
        self.queue.stop()
        if step < self.train.total_steps:
            self.records.progress.log(f"ended after step {step} by {self._over(step)}")
        if summary := self._idle.summary():
            self.records.progress.log(summary)
        if self.eval.stop_at is not None and not reached(self._accuracies, self.eval):
            self.records.progress.log(
                f"warning: eval.stop_at={self.eval.stop_at:g} was not reached in {step} steps; the last "
                f"{min(len(self._accuracies), self.eval.stop_average)} evaluation(s) average {self._recent():.3f}"
            )

    def save_weights(self, step: int) -> None:
        """In Hugging Face format, if asked to."""
        if self.run.save_weights:
            self.dispatcher.run(Save(str(self.records.directory.checkpoints / f"step-{step}")))

    def resume_from(self, position: LoopState) -> None:
        """Begin after a step of a run before, instead of at the start."""
        self._first_step, self._goes_on = position.step + 1, True
        self._nonfinite, self._accuracies = position.nonfinite, deque(position.accuracies)
        self.stages.rollouts.restore(position.selection)
        if self.course is not None and position.phase is not None:
            self.course.restore(position.phase)
        if self.weights is not None:
            self.weights.resume_from(
                position.version, synced=position.synced and self.sync.when == "step"
            )

    def position(self, step: int) -> LoopState:
        """What this loop needs to go on after `step`."""
        return LoopState(
            step=step,
            version=None if self.weights is None else self.weights.version,
            synced=self._synced,
            selection=self.stages.rollouts.state(),
            nonfinite=self._nonfinite,
            accuracies=tuple(self._accuracies),
            phase=None if self.course is None else self.course.state,
        )

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Roll out, credit, plan, train, sync; adds the step's metrics to `values`."""
        watch = Stopwatch()
        with (
            watch.section("rollout"),
            self.keeper.abortable_step() if self.keeper else contextlib.nullcontext(),
        ):
            batch = self.stages.rollouts.draw(step)
        credited = self.stages.credit.assign(step, batch.groups)
        values |= batch.metrics() | credited.metrics()
        plan = self.stages.planner.plan(
            step, credited.rollouts, credited.advantages, credited.uncounted, credited.kept
        )
        outcome: TrainOutcome = self.dispatcher.run(Train(plan))
        applied, tokens = outcome.optimizer_steps, batch.generated_tokens
        values |= usage(plan, applied, generated_tokens=tokens)
        values |= account(
            batch.groups,
            credited,
            plan,
            applied,
            generated_tokens=tokens,
            stopped=batch.stopped,
            surplus=batch.surplus,
            carried=batch.carried_out - batch.carried_in,
        )
        values |= (
            outcome.metrics.values()
            | outcome.seconds
            | {"train/nonfinite": float(not outcome.finite)}
        )
        self.queue.release(batch.delivered)
        self._count_nonfinite(plan, outcome)
        self._synced = False
        with watch.section("sync"):
            if self.sync.when == "step":
                self.send_weights(values)
        values |= watch.values()
        self.records.progress.step(step, values)
        alarms = (self._idle, self._balance, self._selection)
        for warning in (*(alarm.observe(values) for alarm in alarms), warning_of(values)):
            if warning:
                self.records.progress.log(warning)

    def send_weights(self, values: dict[str, float]) -> None:
        """Send the weights to every engine under the next version, unless they have them."""
        if self._synced or self.weights is None:
            return
        command = self.weights.next_command()
        values |= self.dispatcher.run(command)
        if self.weights.audit_obstacle and not self._told_obstacle:
            self._told_obstacle = True
            self.records.progress.log(
                f"weights are not audited by value: {self.weights.audit_obstacle}"
            )
        self.queue.set_version(command.version)
        self._synced = True

    def evaluate(self, step: int, values: dict[str, float]) -> None:
        """Held-out pass@1, added to `values`, when it is due."""
        if self.stages.evaluation is None or not self._evaluation_due(step):
            return
        self.send_weights(values)
        watch = Stopwatch()
        with watch.section("eval"), self.records.progress.task(f"evaluating after step {step}"):
            accuracy = self.stages.evaluation.measure(str(step))
        self._accuracies.append(accuracy.accuracy)
        values |= (
            accuracy.metrics() | watch.seconds | {"account/evaluation": float(accuracy.tokens)}
        )
        values["account/generated"] = values.get("account/generated", 0.0) + accuracy.tokens
        self.records.progress.log(f"step {step}: held-out accuracy {accuracy}")

    def _enter(self, step: int) -> None:
        """Run this step with the parts of its stage, where the run has stages."""
        if self.course is not None:
            self.stages = self.course.enter(step, self.stages)

    def _note(self, values: dict[str, float]) -> None:
        if self.course is not None:
            values |= self.course.note(values)

    def _begin(self) -> None:
        """Bring the engines to the weights that the run begins with; a new run is evaluated, and
        has a record of it.
        """
        if not self._goes_on:
            with self._recorded(0) as values:
                self.send_weights(values)
                self.evaluate(0, values)
        elif self.sync.when == "step":
            self.send_weights(self._pending)

    def _keep(self, step: int, *, last: bool) -> None:
        """Save a checkpoint when it is due, and end the run when it was told to stop."""
        if self.keeper is not None:
            if self.keeper.is_due(step, last=last):
                self._pending |= self.keeper.save(self.position(step), last=last)
            if not last:
                self._leave_if_told(step)  # it may have been told during the save

    def _leave_if_told(self, step: int, at: LoopState | None = None) -> None:
        """End a run that was told to stop, with a checkpoint after a step.

        at: its position, None: where the run is.
        """
        if self.keeper is not None and self.keeper.stop_requested:
            self.keeper.wait_for_save()
            if self.keeper.last_saved_step != step:
                self._pending |= self.keeper.save(at or self.position(step))
            self.keeper.raise_if_stop_requested()

    @contextlib.contextmanager
    def _in_time(self, step: int) -> Iterator[None]:
        """A step that there is no time for, because the run was told to stop, leaves the checkpoint
        of the last one.
        """
        if self.keeper is None:
            yield
            return
        before = self.position(step - 1)
        try:
            yield
        except StepAborted:
            self._leave_if_told(before.step, before)

    def _evaluation_due(self, step: int) -> bool:
        if step == self.train.total_steps:
            return True
        if self.keeper is not None and self.keeper.stop_requested:
            return False  # the time that is left is for the checkpoint
        every = self.eval.every if step else 1
        return step >= self.eval.start_step and every > 0 and step % every == 0

    def _over(self, step: int) -> str:
        """What ended the run with this step; empty where nothing did."""
        if key := ended_by(step, self._accuracies, self.train, self.eval):
            return key
        return self.course.over(step) if self.course is not None else ""

    def _recent(self) -> float:
        return fmean(list(self._accuracies)[-self.eval.stop_average :])

    def _count_nonfinite(self, plan: StepPlan, outcome: TrainOutcome) -> None:
        """Raise `NonFiniteRun` after too many steps in a row with a NaN or Inf; a step without
        rollouts is neither.
        """
        if plan.rollouts:
            self._nonfinite = 0 if outcome.finite else self._nonfinite + 1
        if outcome.finite:
            return
        where = self.records.directory.rollouts / f"nonfinite-step-{plan.step}"
        self.records.progress.log(
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
        values, self._pending = self._pending, {}
        try:
            yield values
        finally:
            self.records.metrics.write(step, values)
