"""Decides when a run saves checkpoints, and ends a run that was asked to stop."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.config.schema import RunSettings
from megatron_rl.contracts.commands import BatchAhead, Checkpoint, WaitForSave
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.run_state import LoopState, RunState
from megatron_rl.records.progress import Progress
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.run.checkpoints.best import BestCheckpoint
from megatron_rl.run.checkpoints.saving import SaveResult
from megatron_rl.run.checkpoints.state_file import encode_state
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.training.dispatcher import Dispatcher

_MIB = 2**20


@dataclass(frozen=True)
class SavePoint:
    """The content of a checkpoint apart from tensors.

    batches: the rollouts that were sampled before their step, by step. open_groups: the sampled
    parts of the groups of open steps, by step. fallback: the state without both, in case that they
    are gone. None: there is none.
    """

    state: LoopState
    batches: Mapping[int, RolloutBatch] = field(default_factory=dict)
    fallback: LoopState | None = None
    open_groups: Mapping[int, tuple[Group, ...]] = field(default_factory=dict)


@dataclass
class CheckpointManager:
    """Rank 0's part in saving checkpoints.

    configuration: every key of the configuration with its value. optimizer_steps: returns the
    number of optimizer steps so far. last_saved_step: the step of the newest checkpoint.
    start_step: the step of another run's checkpoint, from which the run began. None without one.
    reference: digest of the weights of the KL penalty's reference, empty without one. best: follows
    the best evaluation, None without `run.keep_best`.
    """

    settings: RunSettings
    configuration: dict[str, Any]
    world_size: int
    optimizer_steps: Callable[[], int]
    dispatcher: Dispatcher
    progress: Progress
    stop: StopRequest
    last_saved_step: int | None = None
    start_step: int | None = None
    reference: str = ""
    best: BestCheckpoint | None = None
    _is_saving: bool = field(default=False, init=False)

    @property
    def stop_requested(self) -> bool:
        """True once the run was asked to stop, if it saves checkpoints."""
        return self.settings.checkpoint_every > 0 and bool(self.stop.source)

    def is_due(self, step: int, *, last: bool) -> bool:
        """True when a checkpoint must be saved after `step`. last: it is the last step."""
        every = self.settings.checkpoint_every
        if last or self.stop_requested:
            self.wait_for_save()
        if every == 0 or step == self.last_saved_step:
            return False
        is_best = self.best is not None and self.best.is_waiting(step)
        is_regular = last or step % every == 0
        return is_regular or is_best or self.stop_requested

    def observe_evaluation(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Take the metrics of an evaluated step, which may be the best one so far.

        Waits for the best checkpoint if it is being saved; returns its metrics. Raises
        `Failure`.
        """
        if self.best is None:
            return {}
        metrics = self.wait_for_save() if self.best.is_undecided else {}
        self.best.observe(step, values, is_saved=step == self.last_saved_step)
        return metrics

    def save(self, point: SavePoint, *, last: bool = True) -> dict[str, float]:
        """Save a checkpoint; returns its metrics. Raises `Failure`.

        last: no step follows, so the save does not run in the background.
        """
        watch = Stopwatch()
        with watch.section("checkpoint"):
            values = self.wait_for_save()
        in_background = self.settings.background_saves and not last and not self.stop_requested
        task = f"saving the checkpoint of step {point.state.step}"
        with watch.section("checkpoint"), self.progress.task(task):
            command = self._command(point, in_background=in_background)
            result: SaveResult | None = self.dispatcher.run(command)
        self._is_saving = in_background and result is None
        values = watch.seconds | values
        if result is not None and result.lacks_rollouts and point.fallback is not None:
            self.progress.log(f"{result.problem}: they will be sampled again")
            return values | self.save(SavePoint(point.fallback), last=last)
        if result is not None:
            values |= self._report(result)
        return values

    def _command(self, point: SavePoint, *, in_background: bool) -> Checkpoint:
        best = None if self.best is None else self.best.state(point.state.step)
        state = RunState(
            position=point.state,
            optimizer_steps=self.optimizer_steps(),
            world_size=self.world_size,
            settings=self.configuration,
            reference=self.reference,
            best=best,
        )
        batches = [_batch_ahead(step, batch) for step, batch in point.batches.items()]
        batches += [_open_step(step, groups) for step, groups in point.open_groups.items()]
        return Checkpoint(state.step, encode_state(state), in_background, best, tuple(batches))

    def wait_for_save(self) -> dict[str, float]:
        """Wait for the save in the background, if there is one; returns its metrics.

        Raises `Failure`.
        """
        if not self._is_saving:
            return {}
        self._is_saving = False
        with self.progress.task("waiting for the checkpoint that is saved in the background"):
            result: SaveResult = self.dispatcher.run(WaitForSave())
        return self._report(result)

    def seconds_to_stop(self) -> float | None:
        """Return the time in which a run that was asked to stop has to end: `SecondsToStop`."""
        if not self.stop_requested:
            return None
        seconds = self.stop.seconds_left
        return math.inf if seconds is None else seconds

    def raise_if_stop_requested(self) -> None:
        """Raise `Failure` when the run was asked to stop and has a checkpoint."""
        if self.stop_requested and self.last_saved_step is not None:
            raise Failure(
                f"the run was asked to stop ({self.stop.source}) and has saved a checkpoint "
                f"after step {self.last_saved_step}. Start it again with run.resume=auto",
                ExitCode.REQUEUE,
            )

    @contextlib.contextmanager
    def abortable_wait(self) -> Iterator[None]:
        """Allow a stop request to abort the wait for rollouts that follows."""
        self.stop.is_wait_abortable = True
        try:
            yield
        finally:
            self.stop.is_wait_abortable = False

    def _report(self, result: SaveResult) -> dict[str, float]:
        """Log the result of a save; returns its metrics. Raises `Failure`."""
        if result.problem:
            raise self._failure(result)
        self.last_saved_step = result.step
        if self.best is not None:
            self.best.confirm(result.step)
        self.progress.log(f"checkpoint of step {result.step}: {result.nbytes / _MIB:,.1f} MiB")
        return {}

    def _failure(self, result: SaveResult) -> Failure:
        """Return what ends the run because a save has failed."""
        if self.last_saved_step is None:
            remainder = "there is no earlier checkpoint"
        else:
            remainder = f"the checkpoint of step {self.last_saved_step} is still complete"
        problem = (
            f"the checkpoint of step {result.step} cannot be saved: {result.problem}; {remainder}"
        )
        if self.stop_requested and result.lacks_rollouts and result.step == self.start_step:
            # The run has trained nothing, and the rollouts are where it began
            return Failure(
                f"the run was asked to stop ({self.stop.source}) before its first step. Start it "
                f"again with run.resume={self.settings.resume}, under another run.name or with "
                "run.on_existing=overwrite_failed",
                ExitCode.REQUEUE,
            )
        remedy = "Free some space, and start again with run.resume=auto"
        if result.lacks_rollouts:
            resume = self.settings.resume if self.last_saved_step is None else "auto"
            remedy = f"Start again with run.resume={resume}"
        return Failure(f"{problem}. {remedy}", ExitCode.CANNOT_WRITE)


def _batch_ahead(step: int, batch: RolloutBatch) -> BatchAhead:
    return BatchAhead(
        step=step,
        groups=batch.all_groups,
        num_stopped=len(batch.stopped_groups),
        num_surplus=len(batch.surplus_groups),
        generated_tokens=batch.generated_tokens,
        engines_left_out=batch.engines_left_out,
        num_repeated=batch.num_repeated,
        selection_metrics=dict(batch.selection_metrics),
        unused_tokens=dict(batch.unused_tokens),
    )


def _open_step(step: int, groups: Sequence[Group]) -> BatchAhead:
    return BatchAhead(
        step=step,
        groups=tuple(groups),
        num_stopped=0,
        num_surplus=0,
        generated_tokens=sum(map(sampled_tokens, groups)),
        engines_left_out=0,
        num_repeated=0,
        selection_metrics={},
        is_open=True,
    )
