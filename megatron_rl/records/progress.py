"""One line a step for a person to read."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TextIO


class Progress:
    """Prints to `stream` (standard output unless told otherwise); silent when not enabled."""

    def __init__(self, total_steps: int, *, enabled: bool, stream: TextIO | None = None) -> None:
        self._total = total_steps
        self._enabled = enabled
        self._stream = stream if stream is not None else sys.stdout
        self._start = time.monotonic()

    def say(self, text: str) -> None:
        if self._enabled:
            elapsed = time.monotonic() - self._start
            print(f"[{elapsed:6.1f} s] {text}", file=self._stream, flush=True)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        rollout_seconds = values.get("time/rollout", 0.0)
        rate = values["rollout/tokens"] / rollout_seconds if rollout_seconds else 0.0
        parts = [
            f"step {step}/{self._total}",
            f"reward {values.get('reward/mean', float('nan')):.3f}",
            f"{values['rollout/tokens']:.0f} tokens at {rate:.0f}/s",
            f"zero-variance {values.get('rollout/zero_variance_rate', 0.0):.0%}",
            f"entropy {values.get('policy/entropy', float('nan')):.3f}",
            f"grad {values.get('train/grad_norm', float('nan')):.2f}",
        ]
        times = " ".join(
            f"{name} {values[f'time/{name}']:.1f}"
            for name in ("rollout", "old_policy", "train", "sync")
            if f"time/{name}" in values
        )
        self.say(" | ".join(parts) + f" | {values['time/step']:.1f} s ({times})")
