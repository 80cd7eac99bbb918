"""Reads batches of rollouts in the format of `recording.format`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from megatron_rl.contracts.group import Group
from megatron_rl.contracts.rollout import Rollout, Segment
from megatron_rl.rollouts.recording.format import (
    BATCH_FILE,
    FORMAT,
    READABLE_VERSIONS,
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
    if record.format != FORMAT or record.version not in READABLE_VERSIONS:
        versions = " and ".join(f"version {version}" for version in READABLE_VERSIONS)
        raise RecordingUnreadable(
            f"{file} has format {record.format!r} version {record.version}; "
            f"this program reads {FORMAT!r} {versions}"
        )
    return record


def check_batch(directory: Path) -> None:
    """Check that all files of a batch are there and complete, without reading their rollouts.

    Raises `RecordingUnreadable`.
    """
    for part in read_batch_record(directory).parts:
        try:
            with safe_open((directory / part).with_suffix(".safetensors"), "np"):
                pass
            _check_last_line((directory / part).with_suffix(".jsonl"))
        except (OSError, ValueError, SafetensorError) as error:
            raise RecordingUnreadable(f"{directory} is damaged: {part}: {error}") from error


def read_groups(directory: Path) -> list[tuple[Group, list[Rollout]]]:
    """Read the groups of a complete batch in order, each with its rollouts.

    The references in the groups have no location. Raises `RecordingUnreadable`.
    """
    record = read_batch_record(directory)
    groups: dict[int, tuple[Group, list[Rollout]]] = {}
    try:
        for name in record.parts:
            for index, group, rollouts in _read_part(directory / name):
                other_part = groups.get(index)
                part = (group, rollouts)
                groups[index] = part if other_part is None else _merge(index, other_part, part)
    except (OSError, KeyError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
        raise RecordingUnreadable(f"{directory} is damaged: {error}") from error
    if sorted(groups) != list(range(record.groups)):
        raise RecordingUnreadable(f"{directory} holds {len(groups)} of {record.groups} groups")
    return [groups[index] for index in range(record.groups)]


def _check_last_line(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
        if stream.read(1) != b"\n":
            raise ValueError(f"{file.name} has no complete last line")


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
                is_repetitive=r.is_repetitive,
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
            open_samples=record.open_samples,
            environment_error=record.environment_error,
        )
        yield record.index, group, rollouts


def _merge(
    index: int, first: tuple[Group, list[Rollout]], second: tuple[Group, list[Rollout]]
) -> tuple[Group, list[Rollout]]:
    """Merge the parts of a group that two nodes have written, in the order of their samples."""
    refs = first[0].rollouts + second[0].rollouts
    pairs = sorted(
        zip(refs, first[1] + second[1], strict=True), key=lambda pair: pair[0].sample_index
    )
    samples = [ref.sample_index for ref, _ in pairs]
    for sample, following in itertools.pairwise(samples):
        if sample == following:
            raise ValueError(f"group {index} has rollout {sample} twice")
    group = msgspec.structs.replace(first[0], rollouts=tuple(ref for ref, _ in pairs))
    return group, [rollout for _, rollout in pairs]


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
