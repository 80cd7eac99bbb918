"""The rollouts in a checkpoint: sampled before their step, or still open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.contracts.commands import BatchAhead
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.rollouts.queue.saved_groups import SavedGroup
from megatron_rl.rollouts.recording.format import BatchRecord, batch_directory
from megatron_rl.rollouts.recording.reader import RecordingUnreadable
from megatron_rl.rollouts.recording.recorded_rollouts import (
    UnfitRollout,
    load_batch_without_rollouts,
    load_open_groups,
)
from megatron_rl.rollouts.recording.writer import write_batch, write_parts
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.wire.store import RolloutGone, read_rollout
from megatron_rl.training.batch_recording import groups_on_node

_FOLDER = "rollouts"


@dataclass(frozen=True)
class LocalBatch:
    """The part of a batch that one node stores. It may be of a step that is still sampled.

    groups: (place in the batch, group, its rollouts).
    """

    batch: BatchAhead
    groups: Sequence[tuple[int, Group, Sequence[Rollout]]]

    def write(self, checkpoint: Path, node: int) -> list[str]:
        """Write the part into a checkpoint. Returns the names of its files. Raises OSError."""
        return write_parts(self._directory(checkpoint), node, self.groups)

    def complete(self, checkpoint: Path, names: Sequence[str]) -> None:
        """Write what all nodes have in common. names: of the files of all nodes."""
        batch = self.batch
        record = BatchRecord(
            step=batch.step,
            groups=len(batch.groups),
            num_stopped=batch.num_stopped,
            num_surplus=batch.num_surplus,
            generated_tokens=batch.generated_tokens,
            engines_left_out=batch.engines_left_out,
            num_repeated=batch.num_repeated,
            selection_metrics={
                name: value if math.isfinite(value) else None
                for name, value in batch.selection_metrics.items()
            },
            unused_tokens=batch.unused_tokens,
            parts=tuple(names),
            is_open=batch.is_open,
        )
        directory = self._directory(checkpoint)
        directory.mkdir(parents=True, exist_ok=True)
        write_batch(directory, record)

    def _directory(self, checkpoint: Path) -> Path:
        return batch_directory(checkpoint / _FOLDER, self.batch.step)


def read_local_batches(batches: Sequence[BatchAhead], node: int) -> list[LocalBatch]:
    """Read the rollouts that a node stores. Raises OSError if their collector has ended."""
    try:
        return [_read_local_batch(batch, node) for batch in batches]
    except RolloutGone as error:
        raise OSError(str(error)) from error


def _read_local_batch(batch: BatchAhead, node: int) -> LocalBatch:
    groups = [
        (index, group, [read_rollout(ref) for ref in group.rollouts])
        for index, group in groups_on_node(batch.groups, node)
    ]
    return LocalBatch(batch, groups)


def load_batches(
    checkpoint: Path,
    steps: Sequence[int],
    routes: RouteShape | None,
    vocab_size: int,
    *,
    ngram: int | None,
) -> dict[int, tuple[RolloutBatch, list[SavedGroup]]]:
    """Load the batches of a checkpoint, by step, and where their rollouts are.

    routes, vocab_size: of the model. ngram: as in `load_batch`. Raises ValueError when they are
    damaged, or another model has sampled them.
    """
    try:
        return {
            step: load_batch_without_rollouts(
                batch_directory(checkpoint / _FOLDER, step), routes, vocab_size, ngram=ngram
            )
            for step in steps
        }
    except (RecordingUnreadable, UnfitRollout) as error:
        raise ValueError(f"its rollouts cannot be used: {error}") from error


def load_open_steps(
    checkpoint: Path,
    steps: Sequence[int],
    routes: RouteShape | None,
    vocab_size: int,
    *,
    ngram: int | None,
) -> list[SavedGroup]:
    """Load what a checkpoint has of the groups of open steps.

    routes, vocab_size: of the model. ngram: as in `load_batch`. Raises ValueError when they are
    damaged, or another model has sampled them.
    """
    try:
        return [
            group
            for step in steps
            for group in load_open_groups(
                batch_directory(checkpoint / _FOLDER, step), routes, vocab_size, ngram=ngram
            )
        ]
    except (RecordingUnreadable, UnfitRollout) as error:
        raise ValueError(f"its open rollouts cannot be used: {error}") from error
