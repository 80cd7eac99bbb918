"""File format of recorded batches, described in docs/rollouts.md.

A batch is a directory of parts and one `batch.json`. Each part is a JSON Lines file with a group on
each line, and a safetensors file with their arrays. A group whose rollouts are stored on several
nodes has a line for each node. A batch is complete once its `batch.json` exists.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason, Role
from megatron_rl.contracts.wire_types import Count

BATCH_FILE = "batch.json"
FORMAT = "megatron_rl rollouts"
VERSION = 6
# In version 4 each group has one line. Versions 4 and 5 have neither the parts of a verdict nor a
# prompt's details.
READABLE_VERSIONS = (4, 5, 6)


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of `batch.json`.

    groups: number of groups in all parts.
    num_stopped, num_surplus: the last groups of the batch were stopped or surplus (see
    `RolloutBatch`): first `num_stopped` stopped ones, then `num_surplus` surplus ones.
    generated_tokens: tokens that engines sampled for the batch.
    num_repeated, selection_metrics, unused_tokens: as in `RolloutBatch`. None stands for NaN and
    Inf.
    parts: names of the parts without file extensions.
    is_open: only in checkpoints: the groups are what there was of an open step.
    """

    step: Count
    groups: Count
    num_stopped: Count = 0
    num_surplus: Count = 0
    generated_tokens: Count
    engines_left_out: Count
    num_repeated: Count = 0
    selection_metrics: dict[str, float | None] = {}
    unused_tokens: dict[str, Count] = {}
    parts: tuple[str, ...]
    is_open: bool = False
    format: str = FORMAT
    version: int = VERSION


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens of one rollout; see `Segment`.

    tokens: number of tokens.
    has_logprobs: True for sampled tokens.
    """

    tokens: Count
    role: Role
    trainable: bool
    has_logprobs: bool
    route_rows: tuple[Count, Count]
    version: int


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout.

    num_generated, repetition, is_repetitive: as in `RolloutRef`.
    tokens: range [start, stop) of its rows in the part's `tokens` and `logprobs`.
    routes: range [start, stop) of its rows in the part's `routes`, None without routes.
    """

    rollout_id: str
    sample_index: Count
    finish_reason: FinishReason
    num_generated: Count
    verdict: Verdict
    tokens: tuple[Count, Count]
    routes: tuple[Count, Count] | None
    segments: tuple[SegmentRecord, ...]
    repetition: float = 0.0
    is_repetitive: bool = False


class SavedRollout(msgspec.Struct, frozen=True):
    """The place of a recorded rollout: its entry in a part.

    part: absolute path of the part without a file extension.
    """

    part: str
    record: RolloutRecord


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a part: a prompt with its rollouts on one node.

    index: the group's place in the batch. The other keys are as in `Group`.
    """

    index: Count
    group_id: str
    prompt: Prompt
    rejections: dict[str, int]
    rejected_tokens: dict[str, int]
    weight: float
    prompt_weight: float = 1.0
    generated_at: float
    scored_at: float
    rollouts: tuple[RolloutRecord, ...]
    open_samples: tuple[Count, ...] = ()
    environment_error: str = ""


def batch_directory(root: Path, step: int) -> Path:
    """Return the directory of a step's batch below `root`."""
    return root / f"step-{step:07d}"
