"""Reads batches of rollouts in the format of `recording.format`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
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
    SavedRollout,
)
from megatron_rl.rollouts.wire.store import make_rollout_ref


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
    return [
        (group, [rollout for _, rollout in rollouts])
        for group, rollouts in _read_groups(directory, load_file)
    ]


def read_groups_without_routes(
    directory: Path,
) -> list[tuple[Group, list[tuple[SavedRollout, Rollout]]]]:
    """Read the groups of a complete batch in order, each with its rollouts and their places.

    Their routes, which are many times larger than the rest, have the right shape and type, but are
    not read. Raises `RecordingUnreadable`.
    """
    return _read_groups(directory, _load_without_routes)


def read_saved_rollout(saved: SavedRollout, prompt_id: str) -> Rollout:
    """Read one rollout. Raises `RecordingUnreadable`."""
    file = Path(saved.part).with_suffix(".safetensors")
    record = saved.record
    try:
        with safe_open(file, "np") as arrays:
            tokens = slice(*record.tokens)
            rows = {name: arrays.get_slice(name)[tokens] for name in ("tokens", "logprobs")}
            if record.routes is not None:
                rows["routes"] = arrays.get_slice("routes")[slice(*record.routes)]
                record = msgspec.structs.replace(record, routes=(0, len(rows["routes"])))
        record = msgspec.structs.replace(record, tokens=(0, len(rows["tokens"])))
        return _make_rollout(record, prompt_id, rows)
    except (OSError, KeyError, ValueError, SafetensorError) as error:
        raise RecordingUnreadable(f"{file} is damaged: {error}") from error


_Arrays = dict[str, np.ndarray]
_GroupRollouts = tuple[Group, list[tuple[SavedRollout, Rollout]]]


def _read_groups(directory: Path, load: Callable[[Path], _Arrays]) -> list[_GroupRollouts]:
    """Read the groups of a complete batch in order. load: reads the arrays of a part."""
    record = read_batch_record(directory)
    groups: dict[int, _GroupRollouts] = {}
    try:
        for name in record.parts:
            for index, group, rollouts in _read_part(directory / name, load):
                other_part = groups.get(index)
                part = (group, rollouts)
                groups[index] = part if other_part is None else _merge(index, other_part, part)
    except (OSError, KeyError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
        raise RecordingUnreadable(f"{directory} is damaged: {error}") from error
    if sorted(groups) != list(range(record.groups)):
        raise RecordingUnreadable(f"{directory} holds {len(groups)} of {record.groups} groups")
    return [groups[index] for index in range(record.groups)]


def _load_without_routes(file: Path) -> _Arrays:
    with safe_open(file, "np") as arrays:
        loaded_arrays = {name: arrays.get_tensor(name) for name in ("tokens", "logprobs")}
        if "routes" in arrays.keys():  # noqa: SIM118
            routes = arrays.get_slice("routes")
            # All elements are one, so that they take no memory
            element = np.zeros((), routes[0:0].dtype)
            loaded_arrays["routes"] = np.broadcast_to(element, routes.get_shape())
    return loaded_arrays


def _check_last_line(file: Path) -> None:
    with file.open("rb") as stream:
        if stream.seek(0, os.SEEK_END):
            stream.seek(-1, os.SEEK_END)
        if stream.read(1) != b"\n":
            raise ValueError(f"{file.name} has no complete last line")


def _read_part(
    stem: Path, load: Callable[[Path], _Arrays]
) -> Iterator[tuple[int, Group, list[tuple[SavedRollout, Rollout]]]]:
    arrays = load(stem.with_suffix(".safetensors"))
    part = str(stem.absolute())
    for line in stem.with_suffix(".jsonl").read_bytes().splitlines():
        record = msgspec.json.decode(line, type=GroupRecord)
        rollouts = [
            (SavedRollout(part, r), _make_rollout(r, record.prompt.id, arrays))
            for r in record.rollouts
        ]
        refs = [
            make_rollout_ref(
                rollout,
                verdict=saved.record.verdict,
                num_generated=saved.record.num_generated,
                repetition=saved.record.repetition,
                is_repetitive=saved.record.is_repetitive,
            )
            for saved, rollout in rollouts
        ]
        group = Group(
            group_id=record.group_id,
            prompt=record.prompt,
            rollouts=tuple(refs),
            rejections=record.rejections,
            rejected_tokens=record.rejected_tokens,
            weight=record.weight,
            prompt_weight=record.prompt_weight,
            generated_at=record.generated_at,
            scored_at=record.scored_at,
            open_samples=record.open_samples,
            environment_error=record.environment_error,
        )
        yield record.index, group, rollouts


def _merge(index: int, first: _GroupRollouts, second: _GroupRollouts) -> _GroupRollouts:
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


def _make_rollout(record: RolloutRecord, prompt_id: str, arrays: _Arrays) -> Rollout:
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
