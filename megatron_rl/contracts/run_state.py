"""What rank 0 alone knows of a run between two steps: the part of a checkpoint that is no tensor."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.wire_types import Count

STATE_FORMAT = 1


class PromptCursor(msgspec.Struct, frozen=True, kw_only=True):
    """Which prompts were taken.

    put_off: indices of those that a step could not take twice. digest: of all prompts.
    """

    epoch: Count
    position: Count
    digest: str
    put_off: tuple[Count, ...] = ()


class SelectorState(msgspec.Struct, frozen=True, kw_only=True):
    """What chooses a step's prompts, between two steps. beliefs: of selection.name=belief."""

    prompts: PromptCursor
    beliefs: BeliefState | None = None


class PhaseState(msgspec.Struct, frozen=True, kw_only=True):
    """Which of the run's `stages` it is in. begun: its first step. tokens: that engines drew for
    all steps so far.

    accuracy: of the last evaluation since `begun`, None before the first.
    """

    index: Count = 0
    begun: Count = 1
    tokens: Count = 0
    accuracy: float | None = None


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """Where rank 0's loop is after `step`.

    version: of the weights that engines got last, None before the first; synced: whether they hold
    the present ones. nonfinite: how many steps in a row had NaN or Inf. accuracies: of the
    evaluations so far. stage: None without the key `stages`. Between two steps no rollout is under
    way: all that were asked for have been trained on (rollout.max_staleness is 0).
    """

    step: Count
    version: Count | None
    synced: bool
    selection: SelectorState
    nonfinite: Count = 0
    accuracies: tuple[float, ...] = ()
    stage: PhaseState | None = None


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """optimizer_steps: taken so far. settings: every key of the configuration."""

    position: LoopState
    optimizer_steps: Count
    world_size: Count
    settings: dict[str, Any]
    format: int = STATE_FORMAT

    @property
    def step(self) -> int:
        return self.position.step
