"""What rank 0 tells every rank to do."""

from __future__ import annotations

import msgspec

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.contracts.wire_types import Count


class Poll(msgspec.Struct, frozen=True, tag="wait"):
    """Rollouts are under way: ask again. Keeps collectives from timing out while rank 0 is busy."""


class Sync(msgspec.Struct, frozen=True, tag="sync"):
    """Export the weights to the engines as `version`; audit: compare afterwards what they hold."""

    version: int
    audit: bool = False


class Train(msgspec.Struct, frozen=True, tag="plan"):
    """Run one training step."""

    plan: StepPlan


class EnterPhase(msgspec.Struct, frozen=True, tag="enter"):
    """Train with the settings of this one of the run's `stages` from now on."""

    stage: Count


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write the current weights in Hugging Face format into a directory."""

    path: str


class Checkpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Save all that the run needs to go on after `step`. state: what rank 0 alone knows, as it goes
    into a file.

    background: write it while the next steps train; `WaitForSave` tells what became of it.
    """

    step: int
    state: bytes
    background: bool = False


class WaitForSave(msgspec.Struct, frozen=True, tag="settle"):
    """Wait for the checkpoint that is written in the background, if there is one."""


class Record(msgspec.Struct, frozen=True, tag="record"):
    """Write the rollouts of a batch to a directory: every node those that lie there."""

    path: str
    groups: tuple[Group, ...]


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """The run is complete."""


Command = Poll | Sync | Train | EnterPhase | Save | Checkpoint | WaitForSave | Record | Finish
