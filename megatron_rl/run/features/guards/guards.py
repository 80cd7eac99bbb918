"""All guards of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from megatron_rl.config.schema import GuardSettings
from megatron_rl.contracts.commands import Train
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.wire_types import Count
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of
from megatron_rl.run.features.guards.entropy import EntropyGuard
from megatron_rl.run.features.guards.nonfinite import NonFiniteGuard
from megatron_rl.run.features.guards.spikes import SpikeGuard
from megatron_rl.run.features.guards.stopped_by_guard import StoppedByGuard
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.loop.trained_step import TrainedStep


class GuardState(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of the guards (`guard.*`).

    norms: norms of the gradients of the last optimizer steps, the newest last.
    skips: number of most recent consecutive steps with a spike.
    nonfinite, nonfinite_since: number and first of the most recent consecutive steps with NaN or
    Inf; 0 and None without.
    low_entropy_since, low_entropy_steps: first and number of the most recent consecutive steps
    below guard.min_entropy.
    """

    norms: tuple[float, ...] = ()
    skips: Count = 0
    nonfinite: Count = 0
    nonfinite_since: Count | None = None
    low_entropy_since: Count | None = None
    low_entropy_steps: Count = 0


class Guards(Observer):
    """Watches the numbers of every step, and stops the run if they go wrong.

    rollouts: the folder for batches of steps that were not applied. store: the checkpoints of
    `checkpoints`.
    """

    name = "guards"

    def __init__(
        self,
        settings: GuardSettings,
        *,
        rollouts: Path,
        progress: Progress,
        checkpoints: CheckpointManager,
        store: CheckpointStore,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._checkpoints = checkpoints
        self._store = store
        self._spikes = SpikeGuard(settings, rollouts, progress)
        self._entropy = EntropyGuard(settings)
        self._nonfinite = NonFiniteGuard(rollouts, progress, settings.nonfinite)
        # An earlier process, or this one, may have changed the weights
        self._has_updated = False

    def prepare(self, command: Train) -> Train:
        """Limit the norm of the gradients, and look for NaN in the weights."""
        return msgspec.structs.replace(
            command, max_norm=self._spikes.limit, check_weights=self._nonfinite.checks_weights
        )

    def after_train(self, trained_step: TrainedStep, values: dict[str, float]) -> None:
        """Take a step and its metrics, and add the guards' metrics. Raises `StoppedByGuard`."""
        plan = trained_step.plan
        outcome = trained_step.outcome
        self._has_updated = self._has_updated or outcome.optimizer_steps > 0
        limit = self._spikes.limit
        if self._settings.spike != "off":
            values["guard/skipped"] = float(outcome.spike is not None)
        if limit is not None:
            values["guard/max_norm"] = limit
        if outcome.spike is not None:
            values["guard/spike_norm"] = outcome.spike
        with self._good_checkpoint():
            self._nonfinite.observe(plan, outcome)
            self._spikes.observe(plan, outcome, limit)
            self._entropy.observe(plan.step, values.get("policy/entropy"))

    def after_bad_responses(self, step: int, failure: Exception) -> None:
        """Raise `StoppedByGuard` with guard.nonfinite=stop."""
        with self._good_checkpoint():
            self._nonfinite.observe_responses(step, failure)

    def before_end(self) -> None:
        """Raise `StoppedByGuard` after a run without an update, if NaN or Inf is the cause."""
        if not self._has_updated:
            self._nonfinite.require_update()

    def state(self) -> dict[str, Any]:
        """Return the measurements."""
        state: dict[str, Any] = msgspec.to_builtins(
            GuardState(
                norms=tuple(self._spikes.norms),
                skips=self._spikes.skips,
                nonfinite=self._nonfinite.count,
                nonfinite_since=self._nonfinite.since,
                low_entropy_since=self._entropy.since,
                low_entropy_steps=self._entropy.count,
            )
        )
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a run was saved."""
        guard = msgspec.convert(state, GuardState)
        self._has_updated = True
        self._spikes.restore(guard.norms, guard.skips)
        self._nonfinite.count = guard.nonfinite
        self._nonfinite.since = guard.nonfinite_since
        self._entropy.since = guard.low_entropy_since
        self._entropy.count = guard.low_entropy_steps

    @contextlib.contextmanager
    def _good_checkpoint(self) -> Iterator[None]:
        """Set aside the checkpoints of weights that may be at fault, if a guard stops the run.

        A run that resumes then begins with the newest good one.
        """
        try:
            yield
        except StoppedByGuard as failure:
            remedy = self._set_aside_from(failure.first_step)
            text = f"{failure}. {remedy}" if remedy else str(failure)
            raise StoppedByGuard(text, failure.first_step) from failure.__cause__

    def _set_aside_from(self, first_step: int) -> str:
        """Set aside the checkpoints from a step on. Returns what a run can resume from.

        Without a good one they stay: a run that resumes would begin with step 0.
        """
        if not self._checkpoints.settings.checkpoint_every:
            return ""
        try:
            self._checkpoints.wait_for_save()
            checkpoints = {step_of(path) or 0: path for path in self._store.checkpoints()}
            good_steps = [step for step in checkpoints if step < first_step]
            if not good_steps:
                return f"No checkpoint from before step {first_step} is left"
            for step in sorted(checkpoints.keys() - set(good_steps)):
                name = self._store.set_aside(checkpoints[step]).name
                text = f"the weights of step {step} may be at fault: they are in {name}"
                self._progress.log(text)
            if self._store.best_link.is_symlink() and not self._store.best_link.exists():
                self._store.set_best(None)
        except (Failure, OSError) as error:
            self._progress.log(f"warning: checkpoints cannot be set aside: {error}")
            return ""
        return f"run.resume=auto goes on after step {max(good_steps)}"


def open_guards(parts: FeatureParts) -> Guards | None:
    """Return the guards, None where no step is saved or trained."""
    if parts.checkpoints is None:
        return None
    c = parts.configuration
    directory = parts.setup.directory
    return Guards(
        c.guard,
        rollouts=directory.rollouts,
        progress=parts.setup.progress,
        checkpoints=parts.checkpoints,
        store=CheckpointStore(directory.checkpoints),
    )
