"""All guards of a run, and the rollbacks that they ask for."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.schema import GuardSettings
from megatron_rl.contracts.run_state import GuardState, LoopState
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.effective_time import ROLLED_BACK_TO
from megatron_rl.records.progress import Progress
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.guards.entropy import EntropyGuard
from megatron_rl.run.guards.nonfinite import NonFiniteGuard
from megatron_rl.run.guards.rollbacks import Rollbacks
from megatron_rl.run.guards.spikes import SpikeGuard
from megatron_rl.run.guards.trouble import Trouble
from megatron_rl.training.worker import TrainOutcome

_TRAINED = "account/trained/"


class Guards:
    """Watches the numbers of every step, and rolls back if they ask for it.

    max_nonfinite_steps: train.max_nonfinite_steps. rollouts: the folder for batches of steps that
    were not applied. checkpoints: None for loops that save none.
    """

    def __init__(
        self,
        settings: GuardSettings,
        *,
        max_nonfinite_steps: int,
        rollouts: Path,
        progress: Progress,
        checkpoints: CheckpointManager | None,
    ) -> None:
        self._settings = settings
        self._progress = progress
        self._spikes = SpikeGuard(settings, rollouts, progress)
        self._entropy = EntropyGuard(settings)
        self._rollbacks = Rollbacks(settings, checkpoints, progress.log)
        self.nonfinite = NonFiniteGuard(max_nonfinite_steps, rollouts, progress, settings.nonfinite)
        self._trained_tokens = 0

    @property
    def max_norm(self) -> float | None:
        """The limit of the next step's gradients."""
        return self._spikes.limit

    @property
    def state(self) -> GuardState:
        """The measurements, for a checkpoint."""
        return GuardState(
            norms=tuple(self._spikes.norms),
            skips=self._spikes.skips,
            nonfinite_since=self.nonfinite.since,
            low_entropy_since=self._entropy.since,
            low_entropy_steps=self._entropy.count,
            rollbacks=self._rollbacks.records,
            trained_tokens=self._trained_tokens,
        )

    def restore(self, state: LoopState) -> None:
        """Go on where a run was saved."""
        guard = state.guard
        self._spikes.reset(guard.norms)
        self._spikes.skips = guard.skips
        self.nonfinite.count = state.nonfinite
        self.nonfinite.since = guard.nonfinite_since
        self._entropy.since = guard.low_entropy_since
        self._entropy.count = guard.low_entropy_steps
        self._rollbacks.records = guard.rollbacks
        self._trained_tokens = guard.trained_tokens

    def observe(
        self, plan: StepPlan, outcome: TrainOutcome, values: dict[str, float]
    ) -> Trouble | None:
        """Take a step and its metrics, and add those of the guards.

        Returns the reason for a rollback, None without one. Raises `StoppedByGuard`.
        """
        self._trained_tokens += round(_trained_tokens(values))
        limit = self._spikes.limit
        if self._settings.spike != "off":
            values["guard/skipped"] = float(outcome.spike is not None)
        if limit is not None:
            values["guard/max_norm"] = limit
        if outcome.spike is not None:
            values["guard/spike_norm"] = outcome.spike
        if self._settings.rollback_keys:
            values["guard/rollbacks"] = 0.0
        troubles = (
            self.nonfinite.observe(plan, outcome),
            self._spikes.observe(plan, outcome, limit),
            self._entropy.observe(plan.step, values.get("policy/entropy")),
        )
        return next(filter(None, troubles), None)

    def roll_back(self, step: int, trouble: Trouble, values: dict[str, float]) -> LoopState:
        """Roll back on all ranks, and add the metrics. Returns the state of the checkpoint.

        Raises `StoppedByGuard` instead of too many rollbacks, and without a good checkpoint.
        """
        with self._progress.task("rolling back to a checkpoint"):
            position = self._rollbacks.roll_back(step, trouble).position
        lost_tokens = max(0, self._trained_tokens - position.guard.trained_tokens)
        self._trained_tokens = position.guard.trained_tokens
        self._spikes.reset(position.guard.norms)
        self._entropy.reset()
        self.nonfinite.reset()
        values["account/rolled_back"] = float(lost_tokens)
        values["guard/rollbacks"] = 1.0
        values[ROLLED_BACK_TO] = float(position.step)
        self._progress.log(
            f"{trouble.text}. Rolled back to the checkpoint of step {position.step}: {lost_tokens} "
            "trained tokens are lost (account/rolled_back), and newer checkpoints are removed. The "
            f"run goes on with step {step + 1} and new prompts"
        )
        return position


def _trained_tokens(values: dict[str, float]) -> float:
    """The tokens in the gradients that a step applied."""
    tokens = sum(value for name, value in values.items() if name.startswith(_TRAINED))
    return tokens + values.get("account/demonstrated", 0.0)
