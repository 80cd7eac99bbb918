"""Finds spikes of the gradients' norm (`guard.spike`)."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from statistics import median

from megatron_rl.config.schema import GuardSettings
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.records.progress import Progress
from megatron_rl.run.features.guards.stopped_by_guard import StoppedByGuard
from megatron_rl.training.worker import TrainOutcome

# Norms of usual batches differ by less, and those of a diverging run by more.
_FACTOR = 10
_MIN_NORMS = 8
# Optimizer steps that the median covers. It follows norms that change slowly.
_WINDOW = 32
# After as many consecutive spikes, larger norms are the rule and no step would be applied again.
_MAX_SKIPS = 10


class SpikeGuard:
    """Compares the norm of each optimizer step's gradients with the median of earlier ones.

    The ranks compare, before they apply the step: `limit` goes with the plan. Norms of steps that
    were not applied do not enter the median.

    rollouts: the folder that holds the batches with a spike.
    norms: of the last applied optimizer steps. skips: consecutive steps with a spike.
    """

    def __init__(self, settings: GuardSettings, rollouts: Path, progress: Progress) -> None:
        self._settings = settings
        self._rollouts = rollouts
        self._progress = progress
        self.norms: deque[float] = deque(maxlen=_WINDOW)
        self.skips = 0

    @property
    def limit(self) -> float | None:
        """The largest norm that is no spike. None without a guard, and for too few norms."""
        if self._settings.spike == "off" or len(self.norms) < _MIN_NORMS:
            return None
        return _FACTOR * median(self.norms) or None

    def observe(self, plan: StepPlan, outcome: TrainOutcome, limit: float | None) -> None:
        """Take a step that was trained with a limit. Raises `StoppedByGuard`."""
        count = len(self.norms)
        self.norms.extend(outcome.norms)
        if outcome.spike is None or limit is None:
            self.skips = 0 if plan.rollouts else self.skips
            return
        self.skips += 1
        text = (
            f"step {plan.step}: the gradients of optimizer step {outcome.optimizer_steps + 1} have "
            f"the norm {outcome.spike:.4g}, above {limit:.4g} = {_FACTOR} x the "
            f"median of the last {count}"
        )
        batch = self._rollouts / f"spike-step-{plan.step}"
        self._progress.log(
            f"{text}. No rank applied that optimizer step, and the rest of the batch was skipped. "
            f"The batch is in {batch}"
        )
        if self._settings.spike == "stop":
            reason = f"{text} (guard.spike=stop). The batch is in {batch}"
            raise StoppedByGuard(reason, plan.step)
        if self.skips >= _MAX_SKIPS:
            raise StoppedByGuard(
                f"{self.skips} consecutive steps had a spike (guard.spike=skip): {text}. Use "
                "guard.spike=off if such norms are usual",
                plan.step,
            )

    def restore(self, norms: tuple[float, ...], skips: int) -> None:
        """Go on where a run was saved."""
        self.norms = deque(norms, maxlen=_WINDOW)
        self.skips = skips
