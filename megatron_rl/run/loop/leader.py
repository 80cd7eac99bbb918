"""The training loop of rank 0: sample, credit, plan, train, observe, sync, evaluate, save."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_rl.contracts.commands import Train
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.run_records import RunRecords
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.loop.engine_weights import EngineWeights
from megatron_rl.run.loop.evaluations import Evaluations
from megatron_rl.run.loop.sampling import ROLLOUT_FAILURES, Sampling
from megatron_rl.run.loop.saves import Saves
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.run.loop.trained_step import TrainedStep
from megatron_rl.run.supervision.stop_request import WaitAborted
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.worker import LostRollouts, TrainOutcome


@dataclass(frozen=True)
class Leader:
    """Rank 0's loop. Everything collective is a command to `dispatcher`.

    resumed_step: the step after which the run resumes, None for a new run.
    """

    parts: StepParts
    sampling: Sampling
    weights: EngineWeights
    evaluations: Evaluations
    saves: Saves
    observers: Observers
    records: RunRecords
    dispatcher: Dispatcher
    resumed_step: int | None = None

    def lead(self) -> None:
        """Train to the end, save the weights if `run.save_weights` is set, and end every rank."""
        step = self.resumed_step or 0
        self._begin(step)
        while not self.evaluations.ending_key(step):
            step += 1
            with self.saves.keep_trained_steps(step), self.records.record(step) as values:
                is_under_way = self.sampling.is_under_way(step)
                self.observers.before_step(step, self.parts, is_under_way=is_under_way)
                self.train_step(step, values)
                self.evaluations.after_step(step, values, self.saves.save_trained)
                if self.evaluations.ending_key(step):
                    values |= self.sampling.drop()
            self.saves.after_step(step, last=bool(self.evaluations.ending_key(step)))
        self.observers.before_end()
        self.saves.save_weights(step)
        self.dispatcher.finish()
        self.sampling.stop()
        self._report_end(step)

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Sample, credit, plan, train, observe and sync. Adds the metrics of the step to `values`.

        Rollouts that are gone when the ranks ask for them are sampled again.
        """
        watch = Stopwatch()
        batch = self.sampling.sample(step, watch)
        while True:
            with watch.section("credit"):
                credit = self.parts.credit.assign(batch.groups, batch.stopped_groups)
                plan = self.parts.plan(step, credit)
            outcome = self._train(plan)
            if isinstance(outcome, TrainOutcome):
                break
            batch = self.sampling.sample_again(step, batch, outcome.rollout_ids, watch)
        self.weights.expire()
        num_new_tokens, failure = self.sampling.pause(watch)
        trained_step = TrainedStep(batch, credit, plan, outcome)
        values |= batch.metrics() | credit.metrics() | self.sampling.metrics(batch)
        self.observers.after_sampling(batch.all_groups, values)
        with watch.section("account"):
            values |= trained_step.metrics()
            if failure is None:
                self.observers.after_quiet(num_new_tokens, values)
        self.observers.after_train(trained_step, values)
        self.sampling.release(batch)
        with self._save_before_failure(step, values, watch):
            if failure is not None:
                raise failure
            self.weights.send_after_step(values, watch)
            self.sampling.resume(watch)
        self._report_step(step, values, watch)

    def _train(self, plan: StepPlan) -> TrainOutcome | LostRollouts:
        """Let every rank train, with what observers need."""
        command = self.observers.prepare(Train(plan, version=self.sampling.train_version))
        with self.records.progress.task(f"training on the batch of step {plan.step}"):
            result: TrainOutcome | LostRollouts = self.dispatcher.run(command)
        if isinstance(result, TrainOutcome):
            self.saves.note_update()
        return result

    def _begin(self, step: int) -> None:
        """Send the engines the weights that the run begins with.

        A new run is evaluated too, and has a record of step 0. A resumed run makes up for an
        evaluation of `step` that it owes, and writes the record of that step again.
        """
        owed_values = self.evaluations.owed_values
        key = self.evaluations.ending_key(step)
        if key and owed_values is None:
            text = f"nothing is left to train after step {step}: raise {key} to train further"
            self.records.progress.log(text)
            return
        # An evaluation belongs to the phase of its step
        is_under_way = owed_values is not None or self.sampling.is_under_way(step + 1)
        first_step = step + 1 if owed_values is None else step
        self.observers.before_step(first_step, self.parts, is_under_way=is_under_way)
        if self.resumed_step is None:
            with self.records.record(step) as values:
                self.weights.send(values)
                self.evaluations.before_first_step(values)
        elif self.weights.follows_steps:
            self.weights.send(self.records.pending_values)
        if owed_values is not None and not self.saves.stop_requested:
            values = dict(owed_values)
            try:
                self.evaluations.make_up(step, values)
            finally:
                self.records.write(step, values)
        self.sampling.begin_saved_steps(step + 1)
        self.saves.exit_if_requested(step)

    @contextlib.contextmanager
    def _save_before_failure(
        self, step: int, values: dict[str, float], watch: Stopwatch
    ) -> Iterator[None]:
        """Save what a step has trained if the rollouts of later steps fail before its end."""
        try:
            yield
        except (*ROLLOUT_FAILURES, WaitAborted) as failure:
            self._report_step(step, values, watch)
            self.evaluations.postpone(step, values)
            if not isinstance(failure, WaitAborted):
                self.saves.save_trained(step, f"rollouts after step {step}")
            raise

    def _report_step(self, step: int, values: dict[str, float], watch: Stopwatch) -> None:
        """Add the times of a step to its metrics, and print its line."""
        values |= watch.values()
        self.records.progress.log_step(step, values, is_sampled=self.weights.has_engines)
        self.observers.after_step(values)

    def _report_end(self, step: int) -> None:
        key = self.evaluations.ending_key(step)
        ending = "" if key == "train.total_steps" else f"ended after step {step} by {key}"
        warning = self.evaluations.ending_warning(step)
        for line in (ending, self.saves.summary(), self.observers.summary(), warning):
            if line:
                self.records.progress.log(line)
