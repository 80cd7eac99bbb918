"""The training loop of rank 0: a short loop of verbs."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from statistics import fmean

import msgspec

from megatron_rl.config.schema import (
    EngineSettings,
    EvalSettings,
    GuardSettings,
    RunSettings,
    SyncSettings,
    TrainSettings,
)
from megatron_rl.contracts.commands import Save, Train
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.account import account, demonstrations, usage
from megatron_rl.credit.assign import BatchCredit
from megatron_rl.engines.fleet import NoEngineLeft
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.engines.weight_sync import WeightSync
from megatron_rl.records.run_records import RunRecords
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.evaluation import Evaluation
from megatron_rl.rollouts.queue import CollectorFailed, HoldTimedOut
from megatron_rl.rollouts.recording.recorded_rollouts import BadRecording
from megatron_rl.rollouts.rejections import UserClassFailed
from megatron_rl.rollouts.rollout_batch import NonFiniteResponses, RolloutBatch, TooManyRejected
from megatron_rl.rollouts.set_result import measure_set
from megatron_rl.rollouts.steps.on_update import OnUpdate, WaitForResponses
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.run.alarms import (
    AccountAlarm,
    MismatchAlarm,
    SelectionAlarm,
    UnchangedWeightsAlarm,
    ZeroVarianceBalanceAlarm,
)
from megatron_rl.run.checkpoints.manager import CheckpointManager, SavePoint
from megatron_rl.run.checkpoints.store import CheckpointStore
from megatron_rl.run.curriculum import Curriculum
from megatron_rl.run.guards.guards import Guards
from megatron_rl.run.samples.keeper import SampleKeeper
from megatron_rl.run.step_parts import RolloutHolder, StepParts
from megatron_rl.run.stopping import AccuracyUnknown, ending_key, is_accuracy_reached
from megatron_rl.run.supervision.stop_request import WaitAborted
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.worker import LostRollouts, TrainOutcome
from sglang_bridge.errors import EngineError

# With these, all ranks are alive and wait for a command
_ROLLOUT_FAILURES = (
    TooManyRejected,
    UserClassFailed,
    CollectorFailed,
    NoEngineLeft,
    HoldTimedOut,
    BadRecording,
)


@dataclass
class Leader:
    """Rank 0's loop. Everything collective is a command to `dispatcher`.

    parts: the parts of the current step; a curriculum replaces them when a phase begins.
    holder: holds the payloads of sampled rollouts. weights: None without engines. token_counter:
    None where engines do not count tokens.
    checkpoints: None for loops that save none. samples: None for loops that keep none.
    steps_ahead: the batches that are sampled before their step. on_update: what happens to open
    responses when the engines get other weights.
    resume_state: the state to resume from, None for a new run.
    """

    train: TrainSettings
    eval: EvalSettings
    sync: SyncSettings
    run: RunSettings
    parts: StepParts
    holder: RolloutHolder
    weights: WeightSync | None
    dispatcher: Dispatcher
    records: RunRecords
    token_counter: TokenCounter | None = None
    checkpoints: CheckpointManager | None = None
    curriculum: Curriculum | None = None
    samples: SampleKeeper | None = None
    steps_ahead: StepsAhead = field(default_factory=StepsAhead)
    on_update: OnUpdate | None = None
    guard: GuardSettings = field(default_factory=GuardSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    resume_state: InitVar[LoopState | None] = None
    _first_step: int = field(default=1, init=False)
    _is_resumed: bool = field(default=False, init=False)
    _num_updates: int = field(default=0, init=False)
    _pending_metrics: dict[str, float] = field(default_factory=dict, init=False)
    _accuracies: deque[float] = field(default_factory=deque, init=False)
    _is_synced: bool = field(default=False, init=False)
    _is_untrained: bool = field(default=False, init=False)  # the current step has trained nothing
    _unevaluated_metrics: dict[str, float] | None = field(default=None, init=False)
    # Sampled for the next record before the checkpoint
    _uncompared_tokens: int = field(default=0, init=False)
    # Rollouts of later steps when the step had its own
    _num_in_flight: int = field(default=0, init=False)
    _audit_obstacle_logged: bool = field(default=False, init=False)
    _unchanged_weights: UnchangedWeightsAlarm = field(
        default_factory=UnchangedWeightsAlarm, init=False
    )
    _balance: ZeroVarianceBalanceAlarm = field(default_factory=ZeroVarianceBalanceAlarm, init=False)
    _selection: SelectionAlarm = field(default_factory=SelectionAlarm, init=False)
    _account: AccountAlarm = field(default_factory=AccountAlarm, init=False)

    def __post_init__(self, resume_state: LoopState | None) -> None:
        self._guards = Guards(
            self.guard,
            max_nonfinite_steps=self.train.max_nonfinite_steps,
            rollouts=self.records.directory.rollouts,
            progress=self.records.progress,
            checkpoints=self.checkpoints,
            store=CheckpointStore(self.records.directory.checkpoints),
        )
        self._on_update = self.on_update or WaitForResponses(
            self.steps_ahead, self.holder.can_sample
        )
        self._mismatch = MismatchAlarm(self.engine, self.guard.bf16_mismatch)
        if resume_state is not None:
            self._restore(resume_state)

    def lead(self) -> None:
        """Train to the end, save the weights if `run.save_weights` is set, and end every rank."""
        step = self._first_step - 1
        key = self._ending_key(step)
        if key and self._unevaluated_metrics is None:
            self.records.progress.log(
                f"nothing is left to train after step {step}: raise {key} to train further"
            )
        else:
            self._enter_first_phase(step)
            self._begin(step)
            self._begin_saved_steps(step + 1)
            self._exit_if_requested(step)
        while not self._ending_key(step):
            step += 1
            self._run_step(step)
            self._save_checkpoint(step, last=bool(self._ending_key(step)))
        if not self._is_resumed and not self._num_updates:
            self._guards.require_update()
        self.save_weights(step)
        self.dispatcher.finish()
        self.holder.stop()
        self._report_end(step)

    def save_weights(self, step: int) -> None:
        """Write the weights in Hugging Face format, if `run.save_weights` is set."""
        if self.run.save_weights:
            target = self.records.directory.checkpoints / f"step-{step}"
            with self.records.progress.task(f"writing the weights to {target}"):
                self.dispatcher.run(Save(str(target)))

    def state(self, step: int) -> LoopState:
        """Return everything that this loop needs to resume after `step`."""
        return LoopState(
            step=step,
            version=None if self.weights is None else self.weights.version,
            weights_synced=self._is_synced,
            selection=self.steps_ahead.place(self.parts.rollouts),
            nonfinite=self._guards.num_nonfinite,
            guard=self._guards.state,
            accuracies=tuple(self._accuracies),
            phase=None if self.curriculum is None else self.curriculum.state,
            unevaluated_metrics=_to_storable(self._unevaluated_metrics),
            steps_ahead=tuple(self.steps_ahead.batches_after(step)),
            bf16_mismatch=self._mismatch.state,
        )

    def save_point(self, step: int) -> SavePoint:
        """Return what a checkpoint after `step` holds apart from tensors."""
        state = self.state(step)
        fallback = None
        place = self.steps_ahead.state_before(step + 1)
        if place is not None:
            fallback = msgspec.structs.replace(state, selection=place, steps_ahead=())
        return SavePoint(state, self.steps_ahead.batches_after(step), fallback)

    def _save(
        self, step: int, point: SavePoint | None = None, *, last: bool = True
    ) -> dict[str, float]:
        """Save a checkpoint of `step` with what there is of later steps; returns its metrics.

        If open rollouts cannot be stored, the rest is saved before the run ends.

        point: the state after that step, None: the present one.
        Raises `Failure`, `CollectorFailed`, `NoEngineLeft` and `HoldTimedOut`. The
        latter three do not matter if the run has to stop.
        """
        assert self.checkpoints is not None
        watch = Stopwatch()
        open_groups: Mapping[int, tuple[Group, ...]] = {}
        failure: Failure | None = None
        try:
            with watch.section("checkpoint"):
                open_groups = self._on_update.before_save(self.parts.rollouts, self.checkpoints)
        except (CollectorFailed, NoEngineLeft, HoldTimedOut) as error:
            failure = error
            text = f"the checkpoint of step {step} holds no open rollouts: {failure}"
            self.records.progress.log(f"warning: {text}")
        try:
            point = self._with_open_groups(point or self.save_point(step), open_groups)
            values = self.checkpoints.save(point, last=last or failure is not None)
        finally:
            self._on_update.after_save()
        if failure is not None and not self._is_stop_requested():
            raise failure
        seconds = watch.seconds["time/checkpoint"]
        return values | {"time/checkpoint": values["time/checkpoint"] + seconds}

    def _with_open_groups(
        self, point: SavePoint, open_groups: Mapping[int, tuple[Group, ...]]
    ) -> SavePoint:
        """Return a point that also holds what there is of the groups of open steps, by step."""
        state = msgspec.structs.replace(
            point.state,
            open_steps=tuple(open_groups),
            uncompared_tokens=self._uncompared_tokens + self._on_update.num_uncounted,
        )
        if open_groups and self.curriculum is not None:
            # They belong to this phase. The point may have been made before it began
            state = msgspec.structs.replace(state, phase=self.curriculum.state)
        fallback = point.fallback
        if fallback is None and not point.batches:
            fallback = point.state
        return replace(point, state=state, open_groups=open_groups, fallback=fallback)

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Sample, credit, plan, train and sync. Adds the metrics of the step to `values`."""
        watch = Stopwatch()
        batch, credit, plan, outcome = self._train_batch(step, watch)
        self._expire_sync()
        num_new_tokens, failure = self._before_sync(watch)
        values |= batch.metrics() | credit.metrics() | self._ahead_metrics(batch)
        with watch.section("account"):
            values |= self._training_metrics(batch, credit, plan, outcome)
            self.compare_with_engines(values, num_new_tokens)
        values |= self._keep_samples(batch, credit, plan, outcome)
        self.holder.release(batch.delivered_ids)
        self._guards.observe(plan, outcome, values)
        with self._save_before_sync_failure(step, values, watch):
            self._sync_after_step(values, watch, failure)
        self._report_step(step, values, watch)

    def _report_step(self, step: int, values: dict[str, float], watch: Stopwatch) -> None:
        """Add the times of a step to its metrics, print its line and what is wrong."""
        values |= watch.values()
        self.records.progress.log_step(step, values, is_sampled=self.weights is not None)
        self._report_alarms(values)

    def _before_sync(self, watch: Stopwatch) -> tuple[int | None, Failure | WaitAborted | None]:
        """Let no engine work. Returns the tokens that were sampled since the last call.

        A failure is returned instead, and raised when the step has its metrics.
        """
        try:
            with self._next_rollouts(watch), self._abortable():
                return self._on_update.before_sync(self.parts.rollouts), None
        except (*_ROLLOUT_FAILURES, WaitAborted) as failure:
            if self._on_update.is_quiet:
                self._uncompared_tokens += self.parts.rollouts.count_tokens()
            return None, failure

    def _sync_after_step(
        self, values: dict[str, float], watch: Stopwatch, failure: Failure | WaitAborted | None
    ) -> None:
        """Send the weights. failure: raised instead; the one that `_before_sync` returned."""
        if failure is not None:
            raise failure
        with watch.section("sync"):
            if self.sync.when == "step":
                self.send_weights(values)
        with self._next_rollouts(watch), self._abortable():
            self._on_update.after_sync(self.parts.rollouts)

    def _ahead_metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Return metrics of sampling ahead.

        Raises RuntimeError for an age above `rollout.max_staleness`.
        """
        if not self.steps_ahead.is_used:
            return {}
        metrics = batch.age_metrics(self._version)
        age = metrics.get("rollout/age/max", 0.0)
        if age > self.steps_ahead.max_staleness:
            raise RuntimeError(
                f"rollouts of age {age:g} were trained, and the bound is "
                f"rollout.max_staleness={self.steps_ahead.max_staleness}: please report it"
            )
        metrics["rollout/in_flight"] = float(self._num_in_flight)
        metrics["time/engines_idle"] = self.holder.engines_idle_seconds()
        return metrics

    @property
    def _version(self) -> int:
        """The version of the weights that the trainer has at the start of a step."""
        version = None if self.weights is None else self.weights.version
        return version or 0

    def _last_step(self, step: int) -> int:
        """The last step whose rollouts may be sampled while `step` trains."""
        if self.curriculum is None:
            return self.train.total_steps
        return min(self.train.total_steps, self.curriculum.last_step(step))

    def _next_rollouts(self, watch: Stopwatch) -> contextlib.AbstractContextManager[None]:
        """Measure the time that goes to the rollouts of later steps, if there may be some."""
        if not self.steps_ahead.is_used:
            return contextlib.nullcontext()
        return watch.section("next_rollouts")

    def _sample(self, step: int) -> RolloutBatch:
        """Sample the batch of a step."""
        source = self.parts.rollouts
        last_step = self._last_step(step)
        self.steps_ahead.begin_open(step, last_step, source)
        with self._responses_observed(step):
            batch = self.steps_ahead.take(step, source)
        self.steps_ahead.begin_next(step, last_step, source)
        if self.steps_ahead.is_used:
            self._num_in_flight = self.holder.count_in_flight()
        return batch

    @contextlib.contextmanager
    def _responses_observed(self, step: int) -> Iterator[None]:
        """Let the guards judge a batch whose responses are NaN."""
        try:
            yield
        except NonFiniteResponses as failure:
            # The engines may have had the weights of an earlier step
            self._guards.observe_responses(step - self.steps_ahead.max_staleness, failure)
            raise

    def _train_batch(
        self, step: int, watch: Stopwatch
    ) -> tuple[RolloutBatch, BatchCredit, StepPlan, TrainOutcome]:
        """Sample, credit, plan and train a batch. Rollouts that are gone are sampled again.

        Returns the batch that was trained, with its credit, plan and outcome.
        """
        with watch.section("rollout"), self._abortable():
            batch = self._sample(step)
        self._take_devices(watch)
        while True:
            with watch.section("credit"):
                credit = self.parts.credit.assign(step, batch.groups, batch.stopped_groups)
                plan = self._plan(step, credit)
            result = self._train(plan)
            if isinstance(result, TrainOutcome):
                return batch, credit, plan, result
            with watch.section("rollout"), self._abortable():
                if self.engine.colocated:
                    self.send_weights({})
                with self._responses_observed(step):
                    batch = self.parts.rollouts.sample_again(step, batch, result.rollout_ids)
            self._take_devices(watch)

    def _take_devices(self, watch: Stopwatch) -> None:
        """Let engines sleep, if they share their devices with the ranks."""
        if not self.engine.colocated or self.weights is None:
            return
        # An engine that has ended meanwhile cannot sleep, and holds no memory
        self.holder.refresh()
        task = self.records.progress.task("letting the engines sleep")
        with watch.section("sleep"), task:
            self.weights.sleep()
        self._is_synced = False

    def _expire_sync(self) -> None:
        """Note that the engines do not hold the trainer's weights any more."""
        self._is_synced = False
        if self.weights is not None:
            self.weights.expire()

    def _train(self, plan: StepPlan) -> TrainOutcome | LostRollouts:
        keep_values = self.samples is not None and self.samples.is_due(plan.step)
        with self.records.progress.task(f"training on the batch of step {plan.step}"):
            result: TrainOutcome | LostRollouts = self.dispatcher.run(
                Train(
                    plan,
                    keep_values=keep_values,
                    max_norm=self._guards.max_norm,
                    check_weights=self._guards.checks_weights,
                    version=self._version if self.steps_ahead.is_used else None,
                )
            )
        if isinstance(result, TrainOutcome):
            self._is_untrained = False
            self._num_updates += result.optimizer_steps
        return result

    def _keep_samples(
        self, batch: RolloutBatch, credit: BatchCredit, plan: StepPlan, outcome: TrainOutcome
    ) -> dict[str, float]:
        """Keep samples of the step if they are due, and return metrics."""
        if self.samples is None or not self.samples.is_due(plan.step):
            return {}
        watch = Stopwatch()
        with watch.section("samples"), self.records.progress.task("keeping samples"):
            values = self.samples.keep(batch, credit, plan, outcome.extremes)
        return values | watch.seconds

    def _plan(self, step: int, credit: BatchCredit) -> StepPlan:
        return self.parts.planner.plan(
            step,
            credit.rollouts,
            credit.advantages,
            credit.extra_rollouts,
            credit.denominator_only,
            weights=credit.weights,
        )

    def send_weights(self, values: dict[str, float]) -> None:
        """Send the weights to every engine under the next version, unless they hold them."""
        if self._is_synced or self.weights is None:
            return
        # Steps may be so short that nothing waited for rollouts and looked after engines
        self.holder.refresh()
        command = self.weights.next_command()
        with self.records.progress.task("sending the weights to the engines"):
            values |= self.dispatcher.run(command)
        if self.weights.audit_obstacle and not self._audit_obstacle_logged:
            self._audit_obstacle_logged = True
            self.records.progress.log(
                f"weights are not audited by value: {self.weights.audit_obstacle}"
            )
        self.holder.set_version(command.version)
        self._is_synced = True

    def evaluate(self, step: int, values: dict[str, float]) -> None:
        """Send the weights, measure what is due after `step`, and add the metrics to `values`."""
        if self.parts.evaluation is None:
            return
        self.send_weights(values)
        if self._is_due(step, self.eval.every):
            self._measure(step, values, self.parts.evaluation)
        for name, evaluation in self.parts.sets.items():
            if self._is_due(step, evaluation.settings.every):
                self._measure_set(step, name, values, evaluation)
        self.report_account(values)
        if self.checkpoints is not None:
            values |= self.checkpoints.observe_evaluation(step, values)

    def _measure(self, step: int, values: dict[str, float], evaluation: Evaluation) -> None:
        watch = Stopwatch()
        with watch.section("eval"), self._abortable():
            accuracy = evaluation.measure(str(step))
        values |= accuracy.metrics() | watch.seconds
        self._count_evaluation(values, accuracy.tokens)
        self.records.progress.log(f"step {step}: held-out accuracy {accuracy}")
        if accuracy.accuracy is None:
            self._refuse_endings_by_accuracy()
        else:
            self._accuracies.append(accuracy.accuracy)

    def _measure_set(
        self, step: int, name: str, values: dict[str, float], evaluation: Evaluation
    ) -> None:
        watch = Stopwatch()
        with watch.section(f"eval/{name}"), self._abortable():
            result = measure_set(name, evaluation, label=f"{step}-{name}")
        values |= result.metrics() | watch.seconds
        self._count_evaluation(values, result.accuracy.tokens)
        self.records.progress.log(f"step {step}: accuracy of {name} {result.accuracy}")

    def _count_evaluation(self, values: dict[str, float], tokens: int) -> None:
        """Add the tokens of an evaluation to the account."""
        for key in ("account/evaluation", "account/generated"):
            values[key] = values.get(key, 0.0) + tokens
        if self._on_update.is_quiet:
            self.compare_with_engines(values, tokens + self.parts.rollouts.count_tokens())

    def _refuse_endings_by_accuracy(self) -> None:
        """Raise `AccuracyUnknown` if the run, or a phase that is not over, ends by accuracy."""
        if self.eval.stop_at is not None:
            raise AccuracyUnknown(f"eval.stop_at={self.eval.stop_at:g}")
        setting = "" if self.curriculum is None else self.curriculum.ending_by_accuracy
        if setting:
            raise AccuracyUnknown(setting)

    def _restore(self, state: LoopState) -> None:
        self._first_step = state.step + 1
        self._is_resumed = True
        self._guards.restore(state)
        self._mismatch.state = state.bf16_mismatch
        self._accuracies = deque(state.accuracies)
        self._unevaluated_metrics = _from_storable(state.unevaluated_metrics)
        self._uncompared_tokens = state.uncompared_tokens
        self.parts.rollouts.restore(state.selection)
        if self.curriculum is not None and state.phase is not None:
            self.curriculum.restore(state.phase)
        if self.weights is not None:
            is_synced = state.weights_synced and self.sync.when == "step"
            self.weights.resume_from(state.version, is_synced=is_synced)

    def _run_step(self, step: int) -> None:
        with self._stop_in_time(step), self._record(step) as values:
            self._enter_phase(step)
            self.train_step(step, values)
            is_postponed = not self._evaluate_if_due(step, values)
            if self.curriculum is not None:
                values |= self.curriculum.update(values)
            is_last = step == self.train.total_steps
            if is_postponed and not is_last and self._ending_key(step):
                with self._save_on_failure(step, values, is_counted=True):
                    is_postponed = not self._evaluate_again(step, values)
            self._unevaluated_metrics = dict(values) if is_postponed else None
            if self.steps_ahead.is_used and self._ending_key(step):
                values["account/unfinished"] = float(self._drop_steps_ahead())

    def _evaluate_if_due(self, step: int, values: dict[str, float]) -> bool:
        """Evaluate a step if that is due. Returns False if a stop request prevents it."""
        if self.parts.evaluation is None or not self._is_evaluation_due(step):
            return True
        # After a stop request, the remaining time belongs to the checkpoint
        if step != self.train.total_steps and self._is_stop_requested():
            return False
        self.send_weights(values)
        with self._save_on_failure(step, values, is_counted=False):
            return self._evaluate_in_time(step, values)

    def _drop_steps_ahead(self) -> int:
        """Drop rollouts that no step will train. Returns their number of tokens."""
        group_ids, num_tokens = self.steps_ahead.drop(self.parts.rollouts)
        self.holder.release(group_ids)
        return num_tokens

    @contextlib.contextmanager
    def _save_on_failure(
        self, step: int, values: dict[str, float], *, is_counted: bool
    ) -> Iterator[None]:
        """Save what a step has trained if its evaluation fails.

        values: the metrics of the step. is_counted: the curriculum has counted its tokens.
        """
        metrics = dict(values)
        accuracies = self._accuracies.copy()
        try:
            yield
        except (Failure, EngineError):
            self._accuracies = accuracies  # a resumed run evaluates the step again
            if self.curriculum is not None and not is_counted:
                metrics |= self.curriculum.update(metrics)
            self._unevaluated_metrics = metrics
            self._save_trained(step, f"the evaluation of step {step}")
            raise

    @contextlib.contextmanager
    def _save_before_sync_failure(
        self, step: int, values: dict[str, float], watch: Stopwatch
    ) -> Iterator[None]:
        """Save what a step has trained if the rollouts of later steps fail before its end.

        values: the metrics of the step. watch: its times.
        """
        try:
            yield
        except (*_ROLLOUT_FAILURES, WaitAborted) as failure:
            self._report_step(step, values, watch)
            metrics = dict(values)
            if self.curriculum is not None:
                metrics |= self.curriculum.update(metrics)
            is_due = self.parts.evaluation is not None and self._is_evaluation_due(step)
            self._unevaluated_metrics = metrics if is_due else None
            if not isinstance(failure, WaitAborted):
                self._save_trained(step, f"rollouts after step {step}")
            raise

    def _save_trained(self, step: int, subject: str) -> None:
        """Save a step after which something failed. subject: what failed."""
        self.records.progress.log(f"{subject} failed: saving what the step has trained")
        with self._logged_save_problems(step):
            if self.checkpoints is not None and self.checkpoints.settings.checkpoint_every:
                self.checkpoints.save(self.save_point(step))
            elif self._ending_key(step):
                self.save_weights(step)

    def _save_before_failure(self, point: SavePoint, checkpoints: CheckpointManager) -> None:
        """Save the state before a step whose rollouts failed, unless it is saved already."""
        step = point.state.step
        if not checkpoints.settings.checkpoint_every or not step:
            return
        with self._logged_save_problems(step):
            checkpoints.wait_for_save()
            if checkpoints.last_saved_step != step:
                self.records.progress.log(
                    f"the rollouts of step {step + 1} failed: saving what the run has "
                    "trained before"
                )
                checkpoints.save(point)

    @contextlib.contextmanager
    def _logged_save_problems(self, step: int) -> Iterator[None]:
        """Log problems of a save after a failure: they must not hide its cause."""
        try:
            yield
        except Exception as error:
            self.records.progress.log(
                f"warning: step {step} cannot be saved: {type(error).__name__}: {error}"
            )

    def _enter_phase(self, step: int) -> None:
        """Enter the phase of a step.

        A phase that has ended keeps the steps whose rollouts it has sampled already.
        """
        if self.curriculum is None:
            return
        if self.steps_ahead.is_under_way(step, self.parts.rollouts):
            self.parts = self.curriculum.open_phase(step, self.parts)
        else:
            self.parts = self.curriculum.enter(step, self.parts)

    def _enter_first_phase(self, step: int) -> None:
        """Enter the phase of the first step, or stay in that of `step` to evaluate it again."""
        if self._unevaluated_metrics is None:
            self._enter_phase(self._first_step)
        elif self.curriculum is not None:
            self.parts = self.curriculum.open_phase(step, self.parts)

    def _begin(self, step: int) -> None:
        """Send the engines the weights that the run begins with.

        A new run is evaluated too, and has a record of step 0. A resumed run makes up for an
        evaluation of `step` that it owes, and writes the record of that step again.
        """
        if not self._is_resumed:
            self._begin_new_run()
            return
        if self.sync.when == "step":
            self.send_weights(self._pending_metrics)
        if self._unevaluated_metrics is not None and not self._is_stop_requested():
            values = dict(self._unevaluated_metrics)
            try:
                if self._evaluate_again(step, values):
                    self._unevaluated_metrics = None
            finally:
                self.records.metrics.write(step, values)

    def _begin_saved_steps(self, step: int) -> None:
        """Begin the steps that were open in the checkpoint, if the run has to stop.

        The next checkpoint then holds them. step: the first one that is not trained.
        """
        source = self.parts.rollouts
        if self._is_stop_requested() and self.steps_ahead.is_under_way(step, source):
            self.steps_ahead.begin_open(step, self._last_step(step), source)

    def _begin_new_run(self) -> None:
        with self._record(0) as values:
            self.send_weights(values)
            if self.parts.evaluation is None or not self._is_evaluation_due(0):
                return
            if self._is_stop_requested() or not self._evaluate_in_time(0, values):
                self._unevaluated_metrics = dict(values)

    def _evaluate_again(self, step: int, values: dict[str, float]) -> bool:
        """Evaluate a step whose tokens the curriculum has counted.

        Returns False, and changes nothing, if a stop request aborts it.
        """
        if not self._evaluate_in_time(step, values):
            return False
        if self.curriculum is not None and step:
            values |= self.curriculum.update(values | {"rollout/tokens": 0.0})
        return True

    def _evaluate_in_time(self, step: int, values: dict[str, float]) -> bool:
        """Evaluate a step. Returns False, and changes nothing, if a stop request aborts it."""
        accuracies = self._accuracies.copy()
        metrics = dict(values)
        try:
            self.evaluate(step, values)
        except WaitAborted:
            self._accuracies = accuracies
            values.clear()
            values.update(metrics)
            self.records.progress.log(f"a stop request aborted the evaluation of step {step}")
            return False
        return True

    def _training_metrics(
        self, batch: RolloutBatch, credit: BatchCredit, plan: StepPlan, outcome: TrainOutcome
    ) -> dict[str, float]:
        steps = outcome.optimizer_steps
        tokens = batch.generated_tokens
        values = usage(plan, steps, generated_tokens=tokens) | demonstrations(plan, steps)
        values |= account(
            batch.groups,
            credit,
            plan,
            steps,
            generated_tokens=tokens,
            stopped_groups=batch.stopped_groups,
            surplus_groups=batch.surplus_groups,
            unused_tokens=batch.unused_tokens,
        )
        values |= outcome.metrics.values() | outcome.seconds
        values["train/nonfinite"] = float(not outcome.finite)
        return values

    def compare_with_engines(self, values: dict[str, float], counted_tokens: int | None) -> None:
        """Add the tokens that the engines counted since the last call, if they count.

        counted_tokens: those that the run counted since then. None: they are not known.
        """
        comparison = None
        if self.token_counter is not None and counted_tokens is not None:
            comparison = self.token_counter.compare(counted_tokens)
        if comparison is not None:
            earlier_tokens = self._uncompared_tokens
            self._uncompared_tokens = 0
            tokens_by_name = {
                "account/engine_tokens": earlier_tokens + comparison.engine_tokens,
                "account/unaccounted": comparison.uncounted_tokens,
            }
            for name, tokens in tokens_by_name.items():
                values[name] = values.get(name, 0.0) + tokens

    def _report_alarms(self, values: dict[str, float]) -> None:
        alarms = (
            self._unchanged_weights,
            self._balance,
            self._selection,
            self._account,
            self._mismatch,
        )
        self._report_warnings(*(alarm.observe(values) for alarm in alarms))
        values |= self._mismatch.metrics()

    def report_account(self, values: dict[str, float]) -> None:
        """Warn when tokens are in no class."""
        self._report_warnings(self._account.observe(values))

    def _report_warnings(self, *warnings: str | None) -> None:
        for warning in warnings:
            if warning:
                self.records.progress.log(warning)

    def _report_end(self, step: int) -> None:
        log = self.records.progress.log
        if step < self.train.total_steps:
            log(f"ended after step {step} by {self._ending_key(step)}")
        if self.checkpoints is not None and self.checkpoints.best is not None:
            log(self.checkpoints.best.summary())
        summary = self._unchanged_weights.summary()
        if summary:
            log(summary)
        if self.eval.stop_at is not None and not is_accuracy_reached(self._accuracies, self.eval):
            latest = list(self._accuracies)[-self.eval.stop_average :]
            log(
                f"warning: eval.stop_at={self.eval.stop_at:g} was not reached in {step} steps; "
                f"the last {len(latest)} evaluation(s) average {fmean(latest):.3f}"
            )

    def _save_checkpoint(self, step: int, *, last: bool) -> None:
        """Save a checkpoint when it is due, and end the run when a stop was requested."""
        if self.checkpoints is None:
            return
        if self.checkpoints.is_due(step, last=last):
            self._pending_metrics |= self._save(step, last=last)
        if not last or self._unevaluated_metrics is not None:
            self._exit_if_requested(step)  # the request may have come during the save

    def _exit_if_requested(self, step: int, point: SavePoint | None = None) -> None:
        """End a run that was requested to stop, with a checkpoint of `step`.

        point: the state after that step, None: the present one.
        """
        if self.checkpoints is None or not self.checkpoints.stop_requested:
            return
        self.checkpoints.wait_for_save()
        if self.checkpoints.last_saved_step != step:
            self._pending_metrics |= self._save(step, point)
        self.checkpoints.raise_if_stop_requested()

    def _abortable(self) -> contextlib.AbstractContextManager[None]:
        """Mark a wait for rollouts that a stop request may abort."""
        if self.checkpoints is None:
            return contextlib.nullcontext()
        return self.checkpoints.abortable_wait()

    @contextlib.contextmanager
    def _stop_in_time(self, step: int) -> Iterator[None]:
        """Save a step that a stop request aborts, or the state before it if it has trained nothing.

        The state before it is saved, too, if the rollouts of a step fail before it trains.
        """
        if self.checkpoints is None:
            yield
            return
        before = self.save_point(step - 1)
        self._is_untrained = True
        try:
            yield
        except WaitAborted:
            if self._is_untrained:
                self._exit_if_requested(step - 1, before)
            else:
                self._exit_if_requested(step)
            raise
        except _ROLLOUT_FAILURES:
            if self._is_untrained:
                self._save_before_failure(before, self.checkpoints)
            raise

    def _is_evaluation_due(self, step: int) -> bool:
        intervals = [evaluation.settings.every for evaluation in self.parts.sets.values()]
        return any(self._is_due(step, every) for every in (self.eval.every, *intervals))

    def _is_due(self, step: int, every: int) -> bool:
        """True if an evaluation with this interval follows `step`."""
        if step == self.train.total_steps:
            return True
        interval = every if step else 1
        return step >= self.eval.start_step and interval > 0 and step % interval == 0

    def _is_stop_requested(self) -> bool:
        return self.checkpoints is not None and self.checkpoints.stop_requested

    def _ending_key(self, step: int) -> str:
        """Return the key that ends the run with this step, or an empty string."""
        key = ending_key(step, self._accuracies, self.train, self.eval)
        if key or self.curriculum is None:
            return key
        return self.curriculum.ending_reason(step)

    @contextlib.contextmanager
    def _record(self, step: int) -> Iterator[dict[str, float]]:
        """Write the metrics of a step.

        A step that fails has a record, too, if it got as far as its own metrics.
        """
        earlier_metrics = self._pending_metrics
        self._pending_metrics = {}
        values = dict(earlier_metrics)
        try:
            yield values
        except BaseException:
            if values != earlier_metrics:
                self.records.metrics.write(step, values)
            raise
        self.records.metrics.write(step, values)


def _to_storable(metrics: dict[str, float] | None) -> dict[str, float | None] | None:
    """Replace NaN and Inf, which JSON cannot hold, by None."""
    if metrics is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _from_storable(metrics: dict[str, float | None] | None) -> dict[str, float] | None:
    if metrics is None:
        return None
    return {name: math.nan if value is None else value for name, value in metrics.items()}
