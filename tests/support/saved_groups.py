"""Groups in a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.queue.saved_groups import SavedGroup
from megatron_rl.rollouts.recording.format import BatchRecord
from megatron_rl.rollouts.recording.recorded_rollouts import load_open_groups
from megatron_rl.rollouts.recording.writer import write_batch, write_parts


def save_group(directory: Path, group: Group, rollouts: Sequence[Rollout]) -> SavedGroup:
    """Write a group as a checkpoint does, into a folder of its own, and load it from there."""
    names = write_parts(directory, 0, [(0, group, rollouts)])
    record = BatchRecord(
        step=0, groups=1, generated_tokens=0, engines_left_out=0, parts=tuple(names), is_open=True
    )
    write_batch(directory, record)
    (saved_group,) = load_open_groups(directory, None, 10**6, ngram=None)
    return saved_group
