"""Follows the best evaluation of a run, whose checkpoint is never removed."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_rl.contracts.run_state import BestState
from megatron_rl.run.checkpoints.store import CheckpointStore


class BestCheckpoint:
    """Rank 0's record of the best evaluation that has a checkpoint.

    Of equal values the earlier one stays. Step 0 has no checkpoint and does not count.

    metric: the metric that should be high. state: from the checkpoint from which the run resumes.
    It is dropped if it belongs to another metric, or if the best checkpoint is gone.
    """

    def __init__(self, metric: str, store: CheckpointStore, state: BestState | None = None) -> None:
        self._metric = metric
        self._store = store
        self._candidate: BestState | None = None  # has no checkpoint yet
        self._best: BestState | None = None
        if state is not None and state.metric == self._metric:
            self._best = state if self._store.path(state.step).is_dir() else None
        self._store.set_best(self._best)

    def observe(self, step: int, values: Mapping[str, float], *, is_saved: bool) -> None:
        """Take the metrics of an evaluated step. NaN is no value. is_saved: it has a checkpoint."""
        value = values.get(self._metric)
        if value is None or math.isnan(value) or step < 1:
            return
        if self._best is not None and not value > self._best.value:
            return
        self._candidate = BestState(metric=self._metric, value=value, step=step)
        if is_saved:
            self._store.set_best(self._candidate)
            self.confirm(step)

    def is_waiting(self, step: int) -> bool:
        """True if `step` is the best so far and needs a checkpoint."""
        return self._candidate is not None and self._candidate.step == step

    def state(self, step: int) -> BestState | None:
        """Return the best evaluation once the checkpoint of `step` is complete."""
        return self._candidate if self.is_waiting(step) else self._best

    def confirm(self, step: int) -> None:
        """Note that the checkpoint of `step` is complete."""
        if self.is_waiting(step):
            self._best = self._candidate
            self._candidate = None

    @property
    def is_undecided(self) -> bool:
        """True while the checkpoint of the best evaluation is being saved."""
        return self._candidate is not None

    def summary(self) -> str:
        """Describe the best checkpoint for the user."""
        if self._best is None:
            return f"warning: run.keep_best: no checkpoint was evaluated with {self._metric}"
        best = self._best
        link = self._store.best_link
        return f"best checkpoint: step {best.step}, {best.metric}={best.value:.4g}, at {link}"
