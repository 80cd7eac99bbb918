"""Keeps the samples of a run on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.schema import SampleSettings
from megatron_rl.contracts.commands import GatherSamples, SampleSource, Train
from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.assign import BatchCredit
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.records.progress import Progress
from megatron_rl.records.samples.files import samples_file
from megatron_rl.records.samples.parts import SamplePart, TokenPart, ValuePart
from megatron_rl.records.samples.sample import Sample, SampleKind, SampleTraining
from megatron_rl.records.samples.writer import encode, write_samples
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.records.write_errors import write_problem
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.features.samples.assembly import SampleContext, SampleTexts, assemble
from megatron_rl.run.features.samples.selection import MAX_BYTES, MAX_GROUPS, Choice, choose_samples
from megatron_rl.run.loop.trained_step import TrainedStep
from megatron_rl.training.dispatcher import CommandTable
from megatron_rl.training.worker import Worker

_STOPPED = "stopped"
_SURPLUS = "surplus"


class SampleGatherer(Observer):
    """A rank's part in keeping samples."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def handlers(self) -> CommandTable:
        """Return the handler of `GatherSamples`."""
        return {GatherSamples: self._worker.gather_samples}


class SampleKeeper(SampleGatherer):
    """Chooses, gathers and writes the samples of every `samples.every`-th step.

    directory: of the run. run: runs a command on all ranks. max_groups: those that a step keeps.
    A warning of each kind is printed once.
    """

    def __init__(
        self,
        worker: Worker,
        settings: SampleSettings,
        *,
        seed: int,
        directory: Path,
        run: Callable[[GatherSamples], Any],
        texts: SampleTexts,
        progress: Progress,
        max_groups: int = MAX_GROUPS,
    ) -> None:
        super().__init__(worker)
        self._settings = settings
        self._seed = seed
        self._directory = directory
        self._run = run
        self._texts = texts
        self._progress = progress
        self._max_groups = max_groups
        self._printed_kinds: set[str] = set()

    def prepare(self, command: Train) -> Train:
        """Let ranks hold the values of tokens in a step that keeps samples."""
        return msgspec.structs.replace(command, keep_values=self.is_due(command.plan.step))

    def after_train(self, trained_step: TrainedStep, values: dict[str, float]) -> None:
        """Keep samples of the step if they are due, and add metrics."""
        if not self.is_due(trained_step.plan.step):
            return
        watch = Stopwatch()
        with watch.section("samples"), self._progress.task("keeping samples"):
            values |= self.keep(
                trained_step.batch,
                trained_step.credit,
                trained_step.plan,
                trained_step.outcome.extremes,
            )
        values |= watch.seconds

    def is_due(self, step: int) -> bool:
        """Return whether the step keeps samples: the first one, and every `samples.every`-th."""
        every = self._settings.every
        return every > 0 and (step == 1 or step % every == 0)

    def keep(
        self,
        batch: RolloutBatch,
        credit: BatchCredit,
        plan: StepPlan,
        extremes: dict[SampleKind, int],
    ) -> dict[str, float]:
        """Keep samples of the step that was just trained, and return metrics.

        extremes: indices in the plan of rollouts with extreme values.

        An error in the choice or in the file never ends the run: it costs a warning and a metric.
        An error of the ranks does, because they would wait for one another.
        """
        samples = self._choose(batch, credit, plan, extremes)
        if samples is None:
            return _metrics(None, 0)
        parts: list[SamplePart] = []
        if samples.contexts:
            parts = self._run(samples.command)
        num_written = self._write(plan.step, samples.contexts, parts)
        return _metrics(
            num_written, samples.num_left_out + len(samples.contexts) - (num_written or 0)
        )

    def _choose(
        self,
        batch: RolloutBatch,
        credit: BatchCredit,
        plan: StepPlan,
        extremes: dict[SampleKind, int],
    ) -> _Choice | None:
        """Choose the samples, None if that fails."""
        try:
            choices = choose_samples(
                batch.all_groups,
                {kind: plan.rollouts[index] for kind, index in extremes.items()},
                f"{self._seed}/samples/{plan.step}",
                max_groups=self._max_groups,
            )
            contexts = tuple(_contexts(choices.choices, batch, credit, plan))
            return _Choice(contexts, _command(contexts, plan), choices.num_left_out)
        # Any exception: samples are for people, and no reason to lose a run
        except Exception as error:
            self._warn(plan.step, error, f"{type(error).__name__}: {error}")
            return None

    def _write(
        self, step: int, contexts: Sequence[SampleContext], parts: Sequence[SamplePart]
    ) -> int | None:
        """Write the samples and return their number, None if they cannot be written."""
        file = samples_file(self._directory, step)
        try:
            samples = self._assemble(step, contexts, parts)
            return write_samples(file, samples, MAX_BYTES)
        except Exception as error:  # as in `_choose`
            problem = write_problem(error, file)
            self._warn(step, error, problem or f"{type(error).__name__}: {error}")
            return None

    def _warn(self, step: int, error: Exception, reason: str) -> None:
        kind = f"{type(error).__name__} {getattr(error, 'errno', '')}"
        self._print_once(kind, f"step {step} keeps no samples: {reason}")

    def _print_once(self, kind: str, text: str) -> None:
        if kind not in self._printed_kinds:
            self._printed_kinds.add(kind)
            self._progress.log(
                f"warning: {text}. The run continues, and others like it are only counted"
            )

    def _assemble(
        self, step: int, contexts: Sequence[SampleContext], parts: Sequence[SamplePart]
    ) -> list[Sample]:
        tokens: dict[int, TokenPart] = {}
        values: dict[int, ValuePart] = {}
        for part in parts:
            if part.tokens is not None:
                tokens[part.index] = part.tokens
            if part.values is not None:
                values[part.index] = part.values
            if part.problem:
                self._print_once("part", f"step {step} lacks a part of its samples: {part.problem}")
        return [
            assemble(context, tokens[index], values.get(index), self._texts)
            for index, context in enumerate(contexts)
            if index in tokens
        ]


@dataclass(frozen=True)
class _Choice:
    """The samples of a step, and the command that gathers them.

    num_left_out: responses of chosen groups that do not fit into the file.
    """

    contexts: tuple[SampleContext, ...]
    command: GatherSamples
    num_left_out: int


def _metrics(num_written: int | None, num_left_out: int) -> dict[str, float]:
    """Return the metrics of a step. num_written: None if the samples could not be kept."""
    return {
        "samples/kept": float(num_written or 0),
        "samples/left_out": float(num_left_out),
        "samples/failed": float(num_written is None),
    }


def open_samples(parts: FeatureParts) -> SampleGatherer | None:
    """Return this rank's part, None with `samples.every=0` and where nothing is trained."""
    c = parts.configuration
    if not c.samples.every or parts.worker is None or c.mode == "rollout_only":
        return None
    if parts.setup.job.rank:
        return SampleGatherer(parts.worker)
    encode([])  # imports a slow library now, and not in the first step
    return SampleKeeper(
        parts.worker,
        c.samples,
        seed=c.seed,
        directory=parts.setup.directory.path,
        run=parts.dispatcher.run,
        texts=SampleTexts(Tokenizer.from_directory(c.model.path)),
        progress=parts.setup.progress,
    )


def _command(contexts: Sequence[SampleContext], plan: StepPlan) -> GatherSamples:
    plan_indices = {ref.rollout_id: index for index, ref in enumerate(plan.rollouts)}
    rollouts = [context.choice.rollout for context in contexts]
    return GatherSamples(
        tuple(SampleSource(ref, plan_indices.get(ref.rollout_id)) for ref in rollouts)
    )


def _contexts(
    choices: Sequence[Choice], batch: RolloutBatch, credit: BatchCredit, plan: StepPlan
) -> Iterator[SampleContext]:
    advantages = _advantages(credit)
    trained_ids = {ref.rollout_id for ref in plan.rollouts}
    kinds = _group_kinds(batch, credit)
    for choice in choices:
        group: Group = batch.all_groups[choice.group]
        rollout_id = choice.rollout.rollout_id
        yield SampleContext(
            step=plan.step,
            choice=choice,
            prompt=group.prompt,
            training=SampleTraining(
                group_kind=kinds[choice.group],
                is_trained=rollout_id in trained_ids,
                advantage=advantages.get(rollout_id),
                weight=group.weight,
            ),
        )


def _advantages(credit: BatchCredit) -> dict[str, float]:
    """Return the advantages of responses by rollout id.

    Responses that train by the entropies of their tokens have none.
    """

    def by_id(refs: Sequence[RolloutRef], values: Sequence[float]) -> dict[str, float]:
        return {ref.rollout_id: value for ref, value in zip(refs, values, strict=True)}

    extra_rollouts = [e for e in credit.extra_rollouts if e.entropy_advantage == 0.0]
    return by_id(credit.rollouts, credit.advantages) | {
        extra.rollout.rollout_id: extra.advantage for extra in extra_rollouts
    }


def _group_kinds(batch: RolloutBatch, credit: BatchCredit) -> list[str]:
    """Return the kind of each of `batch.all_groups`."""
    kinds = [str(kind) for kind in credit.kinds]
    kinds += [_STOPPED] * len(batch.stopped_groups)
    return kinds + [_SURPLUS] * len(batch.surplus_groups)
