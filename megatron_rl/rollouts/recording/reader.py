"""Reads batches of rollouts in the format of `recording.format`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.rollout import Rollout, Segment
from megatron_rl.rollouts.recording.format import (
    BATCH_FILE,
    FORMAT,
    VERSION,
    BatchRecord,
    GroupRecord,
    RolloutRecord,
)
from megatron_rl.rollouts.store import make_rollout_ref


class RecordingUnreadable(ValueError):
    """A directory does not hold a complete batch in this format."""


def read_batch_record(directory: Path) -> BatchRecord:
    """Read `batch.json`. Raises `RecordingUnreadable`."""
    file = directory / BATCH_FILE
    try:
        record = msgspec.json.decode(file.read_bytes(), type=BatchRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordingUnreadable(f"{file} cannot be read ({error})") from error
    if (record.format, record.version) != (FORMAT, VERSION):
        raise RecordingUnreadable(
            f"{file} has format {record.format!r} version {record.version}; "
            f"this program reads {FORMAT!r} version {VERSION}"
        )
    return record


def read_groups(directory: Path) -> list[tuple[Group, list[Rollout]]]:
    """Read the groups of a complete batch in order, each with its rollouts.

    The references in the groups have no location. Raises `RecordingUnreadable`.
    """
    record = read_batch_record(directory)
    groups: dict[int, tuple[Group, list[Rollout]]] = {}
    try:
        for part in record.parts:
            for index, group, rollouts in _read_part(directory / part):
                groups[index] = group, rollouts
    except (OSError, KeyError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
        raise RecordingUnreadable(f"{directory} is damaged: {error}") from error
    if sorted(groups) != list(range(record.groups)):
        raise RecordingUnreadable(f"{directory} holds {len(groups)} of {record.groups} groups")
    return [groups[index] for index in range(record.groups)]


def _read_part(stem: Path) -> Iterator[tuple[int, Group, list[Rollout]]]:
    arrays = load_file(stem.with_suffix(".safetensors"))
    for line in stem.with_suffix(".jsonl").read_bytes().splitlines():
        record = msgspec.json.decode(line, type=GroupRecord)
        rollouts = [_make_rollout(r, record.prompt.id, arrays) for r in record.rollouts]
        refs = [
            make_rollout_ref(
                rollout,
                verdict=r.verdict,
                num_generated=r.num_generated,
                repetition=r.repetition,
            )
            for r, rollout in zip(record.rollouts, rollouts, strict=True)
        ]
        group = Group(
            group_id=record.group_id,
            prompt=record.prompt,
            rollouts=tuple(refs),
            rejections=record.rejections,
            rejected_tokens=record.rejected_tokens,
            weight=record.weight,
            generated_at=record.generated_at,
            scored_at=record.scored_at,
        )
        yield record.index, group, rollouts


def _make_rollout(record: RolloutRecord, prompt_id: str, arrays: dict[str, np.ndarray]) -> Rollout:
    start, stop = record.tokens
    is_in_range = start <= stop <= len(arrays["tokens"])
    if not is_in_range or sum(s.tokens for s in record.segments) != stop - start:
        raise ValueError(f"rollout {record.rollout_id}: its segments do not cover its tokens")
    segments = []
    for segment in record.segments:
        rows = slice(start, start + segment.tokens)
        segments.append(
            Segment(
                tokens=arrays["tokens"][rows],
                role=segment.role,
                trainable=segment.trainable,
                logprobs=arrays["logprobs"][rows] if segment.has_logprobs else None,
                route_rows=segment.route_rows,
                version=segment.version,
            )
        )
        start += segment.tokens
    return Rollout(
        rollout_id=record.rollout_id,
        prompt_id=prompt_id,
        sample_index=record.sample_index,
        finish_reason=record.finish_reason,
        segments=tuple(segments),
        routes=None if record.routes is None else arrays["routes"][slice(*record.routes)],
    )
