"""What rank 0 alone knows of a run between two steps: the part of a checkpoint that is no tensor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from megatron_rl.config.schema import EvalSettings, TrainSettings
from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.wire_types import Count

NAME = "state.json"
_FORMAT = 1


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
    format: int = _FORMAT

    @property
    def step(self) -> int:
        return self.position.step


def reached(accuracies: Sequence[float], settings: EvalSettings) -> bool:
    """Whether the mean of the last `eval.stop_average` evaluations is what the run was to stop at."""
    if settings.stop_at is None or len(accuracies) < settings.stop_average:
        return False
    return fmean(list(accuracies)[-settings.stop_average :]) >= settings.stop_at


def ended_by(
    step: int, accuracies: Sequence[float], train: TrainSettings, evals: EvalSettings
) -> str:
    """The key that leaves a run nothing to train after a step; empty where there is more."""
    if step >= train.total_steps:
        return "train.total_steps"
    return "eval.stop_at" if reached(accuracies, evals) else ""


def encode_state(state: RunState) -> bytes:
    """As the file `state.json`."""
    return msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n"


def read_state(checkpoint: Path) -> RunState:
    """The state in a checkpoint. Raises ValueError."""
    try:
        state = msgspec.json.decode((checkpoint / NAME).read_bytes(), type=RunState)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"{NAME} cannot be read ({error})") from error
    if state.format != _FORMAT:
        raise ValueError(f"{NAME} is of format {state.format}, and this version reads {_FORMAT}")
    return state
