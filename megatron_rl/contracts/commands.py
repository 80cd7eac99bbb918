"""Commands that rank 0 sends to every rank."""

from __future__ import annotations

import msgspec

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.run_state import BestState
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.contracts.wire_types import Count


class Poll(msgspec.Struct, frozen=True, tag="poll"):
    """Wait for the next command, because rollouts are still running.

    Sent regularly, so that collectives do not time out while rank 0 is busy.
    """


class Sync(msgspec.Struct, frozen=True, tag="sync"):
    """Send the weights to the engines.

    version: number of these weights.
    audit: compare the engines' weights with the trainer's afterwards.
    only: the names of the engines that get them, because they have joined since the last sync.
    None: all engines get them, and the version is new.
    """

    version: int
    audit: bool = False
    only: tuple[str, ...] | None = None


class Train(msgspec.Struct, frozen=True, tag="train"):
    """Run one training step.

    keep_values: hold the values of every trained token until `GatherSamples`.
    max_norm: no rank applies an optimizer step whose gradients have a larger norm. None: no limit.
    check_weights: look for NaN and Inf in the weights afterwards.
    version: of the weights at the start, to tell the ages of tokens. None: ages are not measured.
    """

    plan: StepPlan
    keep_values: bool = False
    max_norm: float | None = None
    check_weights: bool = False
    version: Count | None = None


class SampleSource(msgspec.Struct, frozen=True):
    """One rollout of the last training step that rank 0 keeps as a sample.

    plan_index: its index in the plan of the step, None if it did not train.
    """

    rollout: RolloutRef
    plan_index: Count | None = None


class GatherSamples(msgspec.Struct, frozen=True, tag="gather_samples"):
    """Send the tokens and values of a few rollouts of the last training step to rank 0."""

    sources: tuple[SampleSource, ...]


class EnterPhase(msgspec.Struct, frozen=True, tag="enter_phase"):
    """Train with the settings of another curriculum phase from now on.

    phase: 0-based index in the curriculum.
    """

    phase: Count


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write the current weights in Hugging Face format.

    path: directory to write.
    """

    path: str


class BatchAhead(msgspec.Struct, frozen=True, kw_only=True):
    """The rollouts of a step that is not trained yet. Each node writes the rollouts that it stores.

    groups: credited ones first, then `num_stopped` stopped and `num_surplus` surplus ones.
    generated_tokens, engines_left_out, num_repeated, selection_metrics, unused_tokens: as in
    `RolloutBatch`.
    is_open: the rollouts are still being sampled. The groups are parts as they were requested, in
    any order, and may have `open_samples`.
    """

    step: Count
    groups: tuple[Group, ...]
    num_stopped: Count
    num_surplus: Count
    generated_tokens: Count
    engines_left_out: Count
    num_repeated: Count
    selection_metrics: dict[str, float]
    unused_tokens: dict[str, Count] = {}
    is_open: bool = False


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Save a checkpoint from which the run can resume after `step`.

    state: encoded `RunState`, which only rank 0 has.
    background: write while the next steps train. `WaitForSave` then reports the outcome.
    best: the best evaluation once this checkpoint is complete. Its checkpoint is not removed.
    batches: the rollouts that were sampled before their step.
    """

    step: int
    state: bytes
    background: bool = False
    best: BestState | None = None
    batches: tuple[BatchAhead, ...] = ()


class WaitForSave(msgspec.Struct, frozen=True, tag="wait_for_save"):
    """Wait for the checkpoint that is being written in the background, if any."""


class Record(msgspec.Struct, frozen=True, tag="record"):
    """Write the rollouts of a batch to a directory. Each node writes the rollouts that it stores.

    path: directory to write.
    """

    path: str
    groups: tuple[Group, ...]


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """End the command loop, because the run is complete."""


Command = (
    Poll
    | Sync
    | Train
    | GatherSamples
    | EnterPhase
    | Save
    | Checkpoint
    | WaitForSave
    | Record
    | Finish
)
