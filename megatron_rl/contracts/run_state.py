"""State of a run between two steps, apart from tensors. Rank 0 owns it and checkpoints hold it."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_rl.contracts.belief_state import BeliefState
from megatron_rl.contracts.wire_types import Count

STATE_FORMAT = 2


class PromptCursor(msgspec.Struct, frozen=True, kw_only=True):
    """Position in the shuffled training prompts.

    epoch, position: number of the pass and of the prompts taken in it.
    digest: hash of all prompts.
    postponed_indices: prompts left for a later step, because a step cannot take a prompt twice.
    epoch_range: the pass-rate range with which the pass began, None: all prompts. The pass goes
    through the prompts in that range.
    range_digest: hash of the prompts of that pass. Empty for all prompts, and in states of older
    versions.
    sources: only of a mixture: the position in each source, in the order of data.sources.
    picks: only of a mixture: how often each source had its turn.
    """

    epoch: Count
    position: Count
    digest: str
    postponed_indices: tuple[Count, ...] = ()
    epoch_range: tuple[float, float] | None = None
    range_digest: str = ""
    sources: tuple[PromptCursor, ...] = ()
    picks: tuple[Count, ...] = ()


class SelectorState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the prompt selector between two steps.

    beliefs: only with selection.name=belief.
    """

    prompts: PromptCursor
    beliefs: BeliefState | None = None


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """State of rank 0's training loop after `step`.

    version: weight version sent to the engines last, None before the first.
    weights_synced: whether the engines have the current weights.
    accuracies: all evaluations so far.
    unevaluated_metrics: the metrics of `step` when its evaluation is still to be done, because a
    stop request or a failure prevented it; None otherwise. NaN and Inf are stored as None.
    steps_ahead: the steps after `step` whose rollouts are sampled already. The checkpoint holds
    them.
    open_steps: the steps after those whose rollouts are being sampled. The checkpoint holds what
    there is of them.
    features: the state of each feature that has one, by its name.
    """

    step: Count
    version: Count | None
    weights_synced: bool
    selection: SelectorState
    accuracies: tuple[float, ...] = ()
    unevaluated_metrics: dict[str, float | None] | None = None
    steps_ahead: tuple[Count, ...] = ()
    open_steps: tuple[Count, ...] = ()
    features: dict[str, Any] = {}


class BestState(msgspec.Struct, frozen=True, kw_only=True):
    """The best evaluation of a run whose checkpoint is kept (`run.keep_best`)."""

    metric: str
    value: float
    step: Count


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything rank 0 needs in order to resume a run.

    optimizer_steps: number of optimizer steps so far.
    settings: every key of the configuration, with its value.
    reference: digest of the weights of the KL penalty's reference. Empty without a penalty.
    best: the best evaluation so far, None without `run.keep_best`.
    """

    position: LoopState
    optimizer_steps: Count
    world_size: Count
    settings: dict[str, Any]
    reference: str = ""
    best: BestState | None = None
    format: int = STATE_FORMAT

    @property
    def step(self) -> int:
        return self.position.step
