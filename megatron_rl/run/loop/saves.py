"""Saves after steps, before the end of a run, and what it has trained before a failure."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from megatron_rl.contracts.commands import Save
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import LoopState
from megatron_rl.records.run_records import RunRecords
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.run.checkpoints.manager import CheckpointManager, SavePoint
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.loop.engine_weights import EngineWeights
from megatron_rl.run.loop.evaluations import Evaluations
from megatron_rl.run.loop.sampling import ROLLOUT_FAILURES, STORE_FAILURES, Sampling
from megatron_rl.run.supervision.stop_request import WaitAborted
from megatron_rl.training.dispatcher import Dispatcher


class Saves:
    """Saves checkpoints, and the weights at the end.

    saves_weights: the weights are written in Hugging Face format.
    """

    def __init__(
        self,
        checkpoints: CheckpointManager,
        *,
        sampling: Sampling,
        weights: EngineWeights,
        evaluations: Evaluations,
        observers: Observers,
        records: RunRecords,
        dispatcher: Dispatcher,
        saves_weights: bool,
    ) -> None:
        self._checkpoints = checkpoints
        self._sampling = sampling
        self._weights = weights
        self._evaluations = evaluations
        self._observers = observers
        self._records = records
        self._dispatcher = dispatcher
        self._saves_weights = saves_weights
        self._has_trained = False  # the current step

    @property
    def stop_requested(self) -> bool:
        """True once the run was asked to stop, if it saves checkpoints."""
        return self._checkpoints.stop_requested

    def note_update(self) -> None:
        """Note that the current step has changed the state of the ranks."""
        self._has_trained = True

    def after_step(self, step: int, *, last: bool) -> None:
        """Save a checkpoint when it is due, and end the run when a stop was requested."""
        if self._checkpoints.is_due(step, last=last):
            self._records.pending_values |= self._save(step, last=last)
        if not last or self._evaluations.owed_values is not None:
            self.exit_if_requested(step)  # the request may have come during the save

    def exit_if_requested(self, step: int, point: SavePoint | None = None) -> None:
        """End a run that was requested to stop, with a checkpoint of `step`.

        point: the state after that step, None: the present one.
        """
        if not self._checkpoints.stop_requested:
            return
        self._checkpoints.wait_for_save()
        if self._checkpoints.last_saved_step != step:
            self._records.pending_values |= self._save(step, point)
        self._checkpoints.raise_if_stop_requested()

    @contextlib.contextmanager
    def keep_trained_steps(self, step: int) -> Iterator[None]:
        """Save a step that a stop request aborts, or the state before it if it has trained nothing.

        The state before it is saved, too, if the rollouts of a step fail before it trains.
        """
        before = self._point(step - 1)
        self._has_trained = False
        try:
            yield
        except WaitAborted:
            if self._has_trained:
                self.exit_if_requested(step)
            else:
                self.exit_if_requested(step - 1, before)
            raise
        except ROLLOUT_FAILURES:
            if not self._has_trained:
                self._save_before_failure(before)
            raise

    def save_trained(self, step: int, subject: str) -> None:
        """Save a step after which something failed. subject: what failed."""
        self._records.progress.log(f"{subject} failed: saving what the step has trained")
        with self._problems_logged(step):
            if self._checkpoints.settings.checkpoint_every:
                self._checkpoints.save(self._point(step))
            elif self._evaluations.ending_key(step):
                self.save_weights(step)

    def save_weights(self, step: int) -> None:
        """Write the weights in Hugging Face format, if the run does."""
        if self._saves_weights:
            target = self._records.directory.checkpoints / f"step-{step}"
            with self._records.progress.task(f"writing the weights to {target}"):
                self._dispatcher.run(Save(str(target)))

    def summary(self) -> str:
        """Return a line about the best checkpoint, or an empty string."""
        best = self._checkpoints.best
        return "" if best is None else best.summary()

    def _point(self, step: int) -> SavePoint:
        """Return what a checkpoint after `step` holds apart from tensors."""
        batches = self._sampling.batches_after(step)
        state = LoopState(
            step=step,
            version=self._weights.version,
            weights_synced=self._weights.is_synced,
            selection=self._sampling.place(),
            accuracies=self._evaluations.accuracies,
            unevaluated_metrics=self._evaluations.storable_owed_values(),
            steps_ahead=tuple(batches),
            features=self._observers.state(),
        )
        fallback = None
        place = self._sampling.place_before(step + 1)
        if place is not None:
            fallback = msgspec.structs.replace(state, selection=place, steps_ahead=())
        return SavePoint(state, batches, fallback)

    def _save(
        self, step: int, point: SavePoint | None = None, *, last: bool = True
    ) -> dict[str, float]:
        """Save a checkpoint of `step` with the sampled parts of later steps; returns its metrics.

        If open rollouts cannot be stored, the rest is saved before the run ends.

        point: the state after that step, None: the state once open rollouts are stored.
        Raises `CheckpointNotSaved` and `STORE_FAILURES`. The latter do not matter if the run has to
        stop.
        """
        watch = Stopwatch()
        open_groups: Mapping[int, tuple[Group, ...]] = {}
        failure: Failure | None = None
        try:
            with watch.section("checkpoint"):
                open_groups = self._sampling.before_save()
        except STORE_FAILURES as error:
            failure = error
            text = f"the checkpoint of step {step} holds no open rollouts: {failure}"
            self._records.progress.log(f"warning: {text}")
        try:
            point = self._with_open_groups(point or self._point(step), open_groups)
            values = self._checkpoints.save(point, last=last or failure is not None)
        finally:
            self._sampling.after_save()
        if failure is not None and not self._checkpoints.stop_requested:
            raise failure
        seconds = watch.seconds["time/checkpoint"]
        return values | {"time/checkpoint": values["time/checkpoint"] + seconds}

    def _with_open_groups(
        self, point: SavePoint, open_groups: Mapping[int, tuple[Group, ...]]
    ) -> SavePoint:
        """Return a point that also holds the sampled parts of open groups, by step."""
        features = self._observers.state_to_save(
            point.state.features,
            has_open_steps=bool(open_groups),
            num_uncounted=self._sampling.num_uncounted,
        )
        state = msgspec.structs.replace(
            point.state, open_steps=tuple(open_groups), features=features
        )
        fallback = point.fallback
        if fallback is None and not point.batches:
            fallback = point.state
        return replace(point, state=state, open_groups=open_groups, fallback=fallback)

    def _save_before_failure(self, point: SavePoint) -> None:
        """Save the state before a step whose rollouts failed, unless it is saved already.

        Nothing is saved of a run that has trained nothing.
        """
        step = point.state.step
        is_start = step in (0, self._checkpoints.start_step)
        if is_start or not self._checkpoints.settings.checkpoint_every:
            return
        with self._problems_logged(step):
            self._checkpoints.wait_for_save()
            if self._checkpoints.last_saved_step != step:
                self._records.progress.log(
                    f"the rollouts of step {step + 1} failed: saving what the run has "
                    "trained before"
                )
                self._checkpoints.save(point)

    @contextlib.contextmanager
    def _problems_logged(self, step: int) -> Iterator[None]:
        """Log problems of a save after a failure: they must not hide its cause."""
        try:
            yield
        except Exception as error:
            self._records.progress.log(
                f"warning: step {step} cannot be saved: {type(error).__name__}: {error}"
            )
