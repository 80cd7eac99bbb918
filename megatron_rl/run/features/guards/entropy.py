"""Finds an entropy that has collapsed (`guard.min_entropy`)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config.schema import LOW_ENTROPY_STEPS, GuardSettings
from megatron_rl.run.features.guards.stopped_by_guard import StoppedByGuard


@dataclass
class EntropyGuard:
    """Counts consecutive steps whose mean entropy is below guard.min_entropy.

    since: the first of these steps.
    """

    settings: GuardSettings
    count: int = 0
    since: int | None = None

    def observe(self, step: int, entropy: float | None) -> None:
        """Take the mean entropy of a step's tokens, in nats. None: it trained none.

        The policy from before the step has that entropy. Raises `StoppedByGuard`.
        """
        limit = self.settings.min_entropy
        if limit is None or entropy is None:
            return
        if not entropy < limit:
            self.count = 0
            self.since = None
            return
        self.count += 1
        self.since = step if self.since is None else self.since
        if self.count < LOW_ENTROPY_STEPS:
            return
        text = (
            f"step {step}: policy/entropy {entropy:.4g} is below guard.min_entropy={limit:g}, for "
            f"{LOW_ENTROPY_STEPS} steps or more"
        )
        raise StoppedByGuard(text, max(self.since - 1, 0))
