"""All guards of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_rl.config.schema import GuardSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.run_state import GuardState, LoopState
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.checkpoints.store import CheckpointStore, step_of
from megatron_rl.run.guards.entropy import EntropyGuard
from megatron_rl.run.guards.nonfinite import NonFiniteGuard
from megatron_rl.run.guards.spikes import SpikeGuard
from megatron_rl.run.guards.stopped_by_guard import StoppedByGuard
from megatron_rl.training.worker import TrainOutcome


class Guards:
    """Watches the numbers of every step, and stops the run if they go wrong.

    max_nonfinite_steps: train.max_nonfinite_steps. rollouts: the folder for batches of steps that
    were not applied. checkpoints: None for loops that save none. store: its checkpoints.
    """

    def __init__(
        self,
        settings: GuardSettings,
        *,
        max_nonfinite_steps: int,
        rollouts: Path,
        progress: Progress,
        checkpoints: CheckpointManager | None,
        store: CheckpointStore,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._checkpoints = checkpoints
        self._store = store
        self._spikes = SpikeGuard(settings, rollouts, progress)
        self._entropy = EntropyGuard(settings)
        self._nonfinite = NonFiniteGuard(
            max_nonfinite_steps, rollouts, progress, settings.nonfinite
        )

    @property
    def max_norm(self) -> float | None:
        """The limit of the next step's gradients."""
        return self._spikes.limit

    @property
    def checks_weights(self) -> bool:
        """True if every step looks for NaN in the weights."""
        return self._nonfinite.checks_weights

    @property
    def num_nonfinite(self) -> int:
        """Consecutive steps with a NaN or Inf so far."""
        return self._nonfinite.count

    @property
    def state(self) -> GuardState:
        """The measurements, for a checkpoint."""
        return GuardState(
            norms=tuple(self._spikes.norms),
            skips=self._spikes.skips,
            nonfinite_since=self._nonfinite.since,
            low_entropy_since=self._entropy.since,
            low_entropy_steps=self._entropy.count,
        )

    def restore(self, state: LoopState) -> None:
        """Go on where a run was saved."""
        guard = state.guard
        self._spikes.restore(guard.norms, guard.skips)
        self._nonfinite.count = state.nonfinite
        self._nonfinite.since = guard.nonfinite_since
        self._entropy.since = guard.low_entropy_since
        self._entropy.count = guard.low_entropy_steps

    def observe(self, plan: StepPlan, outcome: TrainOutcome, values: dict[str, float]) -> None:
        """Take a step and its metrics, and add those of the guards. Raises `StoppedByGuard`."""
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

    def observe_responses(self, step: int, failure: Exception) -> None:
        """Take a batch of which too many responses have NaN. Raises `StoppedByGuard`.

        step: the engines had the weights from before it, or newer ones.
        """
        with self._good_checkpoint():
            self._nonfinite.observe_responses(step, failure)

    def require_update(self) -> None:
        """Raise `StoppedByGuard` after a run without an update, if NaN or Inf is the cause."""
        self._nonfinite.require_update()

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
        if self._checkpoints is None or not self._checkpoints.settings.checkpoint_every:
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
