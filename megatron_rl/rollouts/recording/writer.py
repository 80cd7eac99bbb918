"""Batches of rollouts in files that anybody can read: JSON lines for what they are, safetensors for
their arrays.

docs/rollouts.md describes the format. A batch is whole once its `batch.json` is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from megatron_rl.contracts.group import Group, RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.contracts.wire_types import Count
from megatron_rl.records.durable_files import write_synced

BATCH = "batch.json"
_NAME, _VERSION = "megatron_rl rollouts", 2
_PART_BYTES = 256 * 2**20
_NOWHERE = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One batch as a whole.

    stopped, surplus: how many of its last groups are these (see `RolloutBatch`), in this order.
    parts: the names of its files without their endings.
    """

    step: Count
    groups: Count
    stopped: Count = 0
    surplus: Count = 0
    generated_tokens: Count
    engines_left_out: Count
    parts: tuple[str, ...]
    format: str = _NAME
    version: int = _VERSION


class SegmentRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A run of tokens.

    logprobs: whether they have any. route_rows, weights: as `Segment.route_rows`, `.version`.
    """

    tokens: Count
    role: Role
    trainable: bool
    logprobs: bool
    route_rows: tuple[Count, Count]
    weights: int


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. tokens, routes: its rows [start, stop) of the part's arrays; routes None: it has
    none.

    generated, repetition: as in `RolloutRef`.
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


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a part: a prompt with its rollouts. index: its place in the batch."""

    index: Count
    group_id: str
    prompt: Prompt
    rejections: dict[str, int]
    rejected_tokens: dict[str, int]
    weight: float
    generated_at: float
    scored_at: float
    rollouts: tuple[RolloutRecord, ...]


class RecordingUnreadable(ValueError):
    """A directory is not one that this module wrote."""


def batch_directory(recorded: Path, step: int) -> Path:
    """Where the batch of a step lies."""
    return recorded / f"step-{step:07d}"


@dataclass
class _Part:
    """Arrays that grow until they are written."""

    lines: list[bytes] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    num_routes: int = 0
    nbytes: int = 0

    def add(self, index: int, group: Group, rollouts: Sequence[Rollout]) -> None:
        records = tuple(
            self._add(ref, rollout) for ref, rollout in zip(group.rollouts, rollouts, strict=True)
        )
        record = GroupRecord(
            index=index,
            group_id=group.group_id,
            prompt=group.prompt,
            rejections=group.rejections,
            rejected_tokens=group.rejected_tokens,
            weight=group.weight,
            generated_at=group.generated_at,
            scored_at=group.scored_at,
            rollouts=records,
        )
        self.lines.append(msgspec.json.encode(record) + b"\n")

    def _add(self, ref: RolloutRef, rollout: Rollout) -> RolloutRecord:
        first, first_route = self.num_tokens, self.num_routes
        for s in rollout.segments:
            unsampled = np.full(len(s.tokens), np.nan, np.float32)
            self.tokens.append(np.asarray(s.tokens, np.int32))
            self.logprobs.append(
                unsampled if s.logprobs is None else np.asarray(s.logprobs, np.float32)
            )
        self.num_tokens += rollout.num_tokens
        self.nbytes += 8 * rollout.num_tokens
        if rollout.routes is not None:
            self.routes.append(np.asarray(rollout.routes))
            self.num_routes += len(rollout.routes)
            self.nbytes += rollout.routes.nbytes
        return RolloutRecord(
            rollout_id=ref.rollout_id,
            sample_index=ref.sample_index,
            finish_reason=ref.finish_reason,
            num_generated=ref.num_generated,
            verdict=ref.verdict,
            tokens=(first, self.num_tokens),
            routes=None if rollout.routes is None else (first_route, self.num_routes),
            repetition=ref.repetition,
            segments=tuple(
                SegmentRecord(
                    tokens=len(s.tokens),
                    role=s.role,
                    trainable=s.trainable,
                    logprobs=s.logprobs is not None,
                    route_rows=s.route_rows,
                    weights=s.version,
                )
                for s in rollout.segments
            ),
        )

    def write(self, stem: Path) -> None:
        arrays = {
            "tokens": np.concatenate(self.tokens or [np.empty(0, np.int32)]),
            "logprobs": np.concatenate(self.logprobs or [np.empty(0, np.float32)]),
        }
        if self.routes:
            arrays["routes"] = np.concatenate(self.routes)
        data = save(arrays, metadata={"format": _NAME, "version": str(_VERSION)})
        write_synced(stem.with_suffix(".safetensors"), data)
        write_synced(stem.with_suffix(".jsonl"), b"".join(self.lines))


def write_parts(
    directory: Path,
    node: int,
    groups: Iterable[tuple[int, Group, Sequence[Rollout]]],
    *,
    part_bytes: int = _PART_BYTES,
) -> list[str]:
    """A node's groups of one batch, each with its place; returns the names of the parts."""
    directory.mkdir(parents=True, exist_ok=True)
    part = _Part()
    names: list[str] = []

    def end() -> None:
        names.append(f"node-{node}-{len(names):05d}")
        part.write(directory / names[-1])

    for index, group, rollouts in groups:
        part.add(index, group, rollouts)
        if part.nbytes >= part_bytes:
            end()
            part = _Part()
    if part.lines:
        end()
    return names


def write_batch(directory: Path, record: BatchRecord) -> None:
    """The file that makes a batch whole."""
    write_synced(
        directory / BATCH, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"
    )


def read_batch_record(directory: Path) -> BatchRecord:
    """Raises `RecordingUnreadable`."""
    file = directory / BATCH
    try:
        record = msgspec.json.decode(file.read_bytes(), type=BatchRecord)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise RecordingUnreadable(f"{file} cannot be read ({error})") from error
    if (record.format, record.version) != (_NAME, _VERSION):
        raise RecordingUnreadable(f"{file} is of format {record.format!r} version {record.version}")
    return record


def read_groups(directory: Path) -> list[tuple[Group, list[Rollout]]]:
    """The groups of a whole batch in their order, each with its rollouts.

    Raises `RecordingUnreadable`.
    """
    record = read_batch_record(directory)
    try:
        found = {
            i: (group, held)
            for part in record.parts
            for i, group, held in _read_part(directory / part)
        }
    except (OSError, KeyError, ValueError, msgspec.MsgspecError, SafetensorError) as error:
        raise RecordingUnreadable(f"{directory} is damaged: {error}") from error
    if sorted(found) != list(range(record.groups)):
        raise RecordingUnreadable(f"{directory} holds {len(found)} of {record.groups} groups")
    return [found[index] for index in range(record.groups)]


def _read_part(stem: Path) -> Iterator[tuple[int, Group, list[Rollout]]]:
    arrays = load_file(stem.with_suffix(".safetensors"))
    for line in stem.with_suffix(".jsonl").read_bytes().splitlines():
        record = msgspec.json.decode(line, type=GroupRecord)
        rollouts = [_rollout(r, record.prompt.id, arrays) for r in record.rollouts]
        group = Group(
            group_id=record.group_id,
            prompt=record.prompt,
            rollouts=tuple(
                _ref(r, rollout) for r, rollout in zip(record.rollouts, rollouts, strict=True)
            ),
            rejections=record.rejections,
            rejected_tokens=record.rejected_tokens,
            weight=record.weight,
            generated_at=record.generated_at,
            scored_at=record.scored_at,
        )
        yield record.index, group, rollouts


def _rollout(record: RolloutRecord, prompt_id: str, arrays: dict[str, np.ndarray]) -> Rollout:
    start, stop = record.tokens
    if (
        not start <= stop <= len(arrays["tokens"])
        or sum(s.tokens for s in record.segments) != stop - start
    ):
        raise ValueError(f"rollout {record.rollout_id}: its segments do not cover its tokens")
    segments = []
    for s in record.segments:
        rows = slice(start, start + s.tokens)
        logprobs = arrays["logprobs"][rows] if s.logprobs else None
        segments.append(
            Segment(arrays["tokens"][rows], s.role, s.trainable, logprobs, s.route_rows, s.weights)
        )
        start += s.tokens
    routes = None if record.routes is None else arrays["routes"][slice(*record.routes)]
    return Rollout(
        record.rollout_id,
        prompt_id,
        record.sample_index,
        record.finish_reason,
        tuple(segments),
        routes,
    )


def _ref(record: RolloutRecord, rollout: Rollout) -> RolloutRef:
    return RolloutRef(
        rollout_id=record.rollout_id,
        prompt_id=rollout.prompt_id,
        sample_index=record.sample_index,
        num_inputs=rollout.num_tokens - 1,
        num_trainable=sum(len(s.tokens) for s in rollout.segments if s.trainable),
        num_generated=record.num_generated,
        repetition=record.repetition,
        finish_reason=record.finish_reason,
        versions=tuple(sorted({s.version for s in rollout.segments if s.logprobs is not None})),
        verdict=record.verdict,
        location=_NOWHERE,
    )
