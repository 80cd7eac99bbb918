"""The main job as rank 0 sees it: a short loop of verbs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.commands import Finish, SaveWeights, Train, Wait
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.plan import StepPlan
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.credit.advantages import assign_advantages, permute_rewards
from megatron_rl.credit.kinds import eliminate
from megatron_rl.planning.step_plan import plan_step
from megatron_rl.prompts.source import PromptSource
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.progress import Progress
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.batch import RolloutBatch, roll_out
from megatron_rl.rollouts.evaluation import Accuracy, evaluate
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.sync.weight_sync import WeightSync
from megatron_rl.training.collectives import ControlChannel
from megatron_rl.training.worker import TrainOutcome, Worker


class NonFiniteRun(RuntimeError):
    """Too many consecutive steps met a NaN or Inf."""


@dataclass(frozen=True)
class LoopSettings:
    """The numbers of the loop; keys of the same names in `train`, `rollout`, `eval`, `algo` and `sync`."""

    total_steps: int
    prompts_per_step: int
    samples_per_prompt: int
    sampling: Sampling
    eval_sampling: Sampling
    eval_every: int
    eval_samples_per_prompt: int
    optimizer_steps_per_batch: int
    tokens_per_micro_batch: int
    micro_batch_multiple: int
    normalize_std: bool
    zero_variance: str
    permute_rewards: bool
    max_nonfinite_steps: int
    seed: int


@dataclass
class TrainingLoop:
    """Rank 0's loop over the stages; every collective goes through `control` first."""

    settings: LoopSettings
    prompts: PromptSource
    producer: RolloutQueue
    control: ControlChannel
    worker: Worker
    weights: WeightSync
    log: MetricsLog
    progress: Progress
    check_services: Callable[[], None]
    _nonfinite: int = 0

    def run(self) -> Accuracy:
        """Train to the end; returns the last evaluation."""
        with self._recorded(0) as values:
            values |= self.sync()
            accuracy = self.evaluate(0, values)
        for step in range(1, self.settings.total_steps + 1):
            with self._recorded(step) as values:
                self.train_step(step, values)
                if self._evaluation_due(step):
                    accuracy = self.evaluate(step, values)
        return accuracy

    def train_step(self, step: int, values: dict[str, float]) -> None:
        """Roll out, eliminate, plan, train, sync; adds the step's metrics to `values`."""
        watch = Stopwatch()
        with watch.stage("rollout"):
            batch = self.roll_out(step)
        values |= batch.metrics()
        kept, counts = self.eliminate(batch, step)
        plan = self.plan(step, kept)
        values |= counts
        outcome = self.train(plan)
        values |= (
            _usage(batch, plan, outcome.optimizer_steps)
            | outcome.metrics.values()
            | outcome.seconds
            | {"train/nonfinite": float(not outcome.finite)}
        )
        self.producer.release(batch.group_ids)
        self._count_nonfinite(plan, outcome)
        with watch.stage("sync"):
            values |= self.sync()
        values |= watch.values()
        self.progress.step(step, values)

    def roll_out(self, step: int) -> RolloutBatch:
        settings = self.settings
        return roll_out(
            self.producer,
            self.prompts.take(settings.prompts_per_step),
            label=f"step-{step}",
            samples_per_prompt=settings.samples_per_prompt,
            sampling=settings.sampling,
            idle=self._idle,
        )

    def eliminate(self, batch: RolloutBatch, step: int) -> tuple[Sequence[Group], dict[str, float]]:
        groups: Sequence[Group] = batch.groups
        if self.settings.permute_rewards:
            groups = permute_rewards(groups, seed=self.settings.seed * 1_000_003 + step)
        result = eliminate(groups, self.settings.zero_variance)
        counts = {f"rollout/groups/{kind}": float(count) for kind, count in result.counts.items()}
        return result.kept, counts | {"rollout/zero_variance_rate": result.zero_variance_rate}

    def plan(self, step: int, groups: Sequence[Group]) -> StepPlan:
        settings = self.settings
        samples, advantages = assign_advantages(groups, normalize_std=settings.normalize_std)
        return plan_step(
            step,
            samples,
            advantages,
            dp_size=self.worker.layout.dp_size,
            optimizer_steps=settings.optimizer_steps_per_batch,
            tokens_per_micro_batch=settings.tokens_per_micro_batch,
            micro_batch_multiple=settings.micro_batch_multiple,
            seed=settings.seed,
        )

    def train(self, plan: StepPlan) -> TrainOutcome:
        """Every rank trains its part of the plan."""
        with self.control.ordered(Train(plan)):
            return self.worker.train(plan)

    def _count_nonfinite(self, plan: StepPlan, outcome: TrainOutcome) -> None:
        """Raise `NonFiniteRun` after too many steps in a row with a NaN or Inf; a step without samples is neither."""
        if plan.samples:
            self._nonfinite = 0 if outcome.finite else self._nonfinite + 1
        if not outcome.finite:
            where = self.worker.rollouts_directory / f"nonfinite-step-{plan.step}"
            self.progress.say(
                f"step {plan.step}: NaN or Inf in loss or gradients; that optimizer step was applied on no rank and "
                f"the rest of the batch was left out; the batch is in {where}"
            )
            if self._nonfinite >= self.settings.max_nonfinite_steps:
                raise NonFiniteRun(
                    f"{self._nonfinite} steps in a row had NaN or Inf in loss or gradients "
                    f"(train.max_nonfinite_steps={self.settings.max_nonfinite_steps}); their batches: {where.parent}"
                )

    def sync(self) -> dict[str, float]:
        """Send the weights to every engine under the next version."""
        command = self.weights.next_command()
        with self.control.ordered(command):
            values = self.weights.push(command, self.worker.export(self.weights.dtype))
        if self.weights.must_locate:
            with self.control.ordered(command):
                self.weights.locate(command, self.worker.export(self.weights.dtype))
        if self.weights.audit_obstacle and command.version == 0:
            self.progress.say(f"weights are not audited: {self.weights.audit_obstacle}")
        self.producer.set_version(command.version)
        return values

    def evaluate(self, step: int, values: dict[str, float]) -> Accuracy:
        """Held-out pass@1, added to `values`."""
        watch = Stopwatch()
        with watch.stage("eval"):
            accuracy = evaluate(
                self.producer,
                self.prompts.held_out,
                label=str(step),
                samples_per_prompt=self.settings.eval_samples_per_prompt,
                sampling=self.settings.eval_sampling,
                idle=self._idle,
            )
        values |= accuracy.metrics() | watch.seconds
        self.progress.say(
            f"step {step}: held-out accuracy {accuracy.accuracy:.3f} ± {accuracy.half_width:.3f} "
            f"({accuracy.questions} questions x {self.settings.eval_samples_per_prompt}, "
            f"{accuracy.parseable:.1%} parseable)"
        )
        return accuracy

    def finish(self, save_to: Path | None) -> None:
        """Save the weights if asked to and let every rank end."""
        if save_to is not None:
            with self.control.ordered(SaveWeights(str(save_to))):
                self.worker.save(save_to)
        self.control.send(Finish())
        self.producer.stop()

    def _evaluation_due(self, step: int) -> bool:
        every = self.settings.eval_every
        return step == self.settings.total_steps or (every > 0 and step % every == 0)

    @contextlib.contextmanager
    def _recorded(self, step: int) -> Iterator[dict[str, float]]:
        """What a step measured is written even when the step fails."""
        values: dict[str, float] = {}
        try:
            yield values
        finally:
            self.log.write(step, values)

    def _idle(self) -> None:
        self.check_services()
        self.control.send(Wait())


def _usage(batch: RolloutBatch, plan: StepPlan, applied: int) -> dict[str, float]:
    """How much of what was generated is in the `applied` optimizer steps."""
    used = (i for step in plan.optimizer_steps[:applied] for rank in step.micro_batches for m in rank for i in m)
    trained = sum(plan.samples[i].num_trainable for i in used)
    wasted = 1.0 - trained / batch.generated_tokens if batch.generated_tokens else 0.0
    return {
        "rollout/wasted_token_fraction": wasted,
        "train/samples": float(len(plan.samples)),
        "train/optimizer_steps": float(applied),
        "train/micro_batches": float(sum(len(step.micro_batches[0]) for step in plan.optimizer_steps)),
    }
