"""Prints the warnings of all alarms."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_rl.config.schema import EngineSettings
from megatron_rl.records.progress import Progress
from megatron_rl.run.features.alarms.alarms import (
    AccountAlarm,
    MismatchAlarm,
    MismatchState,
    SelectionAlarm,
    UnchangedWeightsAlarm,
    ZeroVarianceBalanceAlarm,
)
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts


class AccountWarnings(Observer):
    """Warns when tokens are in no class."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._account = AccountAlarm()

    def after_step(self, values: dict[str, float]) -> None:
        """Warn about the account of a step."""
        self._warn(self._account.observe(values))

    def after_evaluation(self, values: dict[str, float]) -> None:
        """Warn about the account of a step with its evaluation."""
        self._warn(self._account.observe(values))

    def _warn(self, *warnings: str | None) -> None:
        for warning in filter(None, warnings):
            self._progress.log(warning)


class Alarms(AccountWarnings):
    """Warns about each step that is trained, and adds metrics of the mismatch."""

    name = "alarms"

    def __init__(self, progress: Progress, engine: EngineSettings) -> None:
        super().__init__(progress)
        self._unchanged_weights = UnchangedWeightsAlarm()
        self._balance = ZeroVarianceBalanceAlarm()
        self._selection = SelectionAlarm()
        self._mismatch = MismatchAlarm(engine)

    def after_step(self, values: dict[str, float]) -> None:
        """Print what is wrong with a step."""
        self._warn(
            self._unchanged_weights.observe(values),
            self._balance.observe(values),
            self._selection.observe(values),
        )
        super().after_step(values)
        self._warn(self._mismatch.observe(values))
        values |= self._mismatch.metrics()

    def summary(self) -> str:
        """Return the number of steps that trained nothing, with advice."""
        return self._unchanged_weights.summary() or ""

    def state(self) -> dict[str, Any]:
        """Return what later runs compare the mismatch with."""
        state: dict[str, Any] = msgspec.to_builtins(self._mismatch.state)
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a run was saved."""
        self._mismatch.state = msgspec.convert(state, MismatchState)


def open_alarms(parts: FeatureParts) -> AccountWarnings | None:
    """Return the alarms of rank 0, None where nothing is trained or recorded."""
    if parts.checkpoints is None:
        return None
    c = parts.configuration
    progress = parts.setup.progress
    if c.mode == "rollout_only":
        return AccountWarnings(progress)
    engine = EngineSettings() if parts.connections is None else c.engine
    return Alarms(progress, engine)
