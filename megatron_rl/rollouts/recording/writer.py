"""Writes batches of rollouts in the format of `recording.format`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from safetensors.numpy import save

from megatron_rl.contracts.group import Group, RolloutRef
from megatron_rl.contracts.rollout import Rollout, Segment
from megatron_rl.records.durable_files import sync_folder, write_synced
from megatron_rl.rollouts.recording.format import (
    BATCH_FILE,
    FORMAT,
    VERSION,
    BatchRecord,
    GroupRecord,
    RolloutRecord,
    SegmentRecord,
)

_PART_BYTES = 256 * 2**20


def write_parts(
    directory: Path,
    node: int,
    groups: Iterable[tuple[int, Group, Sequence[Rollout]]],
    *,
    part_bytes: int = _PART_BYTES,
) -> list[str]:
    """Write one node's groups of a batch and return the names of the parts.

    If an earlier attempt completed the batch, it becomes incomplete before a file is written:
    otherwise files of two attempts could pass as one batch.

    groups: (place in the batch, group, its rollouts).
    part_bytes: size of the arrays at which a part ends and the next begins.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / BATCH_FILE).unlink(missing_ok=True)
    sync_folder(directory)
    part = _Part()
    names: list[str] = []

    def finish_part() -> None:
        names.append(f"node-{node}-{len(names):05d}")
        part.write(directory / names[-1])

    for index, group, rollouts in groups:
        part.add(index, group, rollouts)
        if part.nbytes >= part_bytes:
            finish_part()
            part = _Part()
    if part.lines:
        finish_part()
    return names


def write_batch(directory: Path, record: BatchRecord) -> None:
    """Write `batch.json`, which completes a batch. Call it after all parts are written."""
    directory.mkdir(parents=True, exist_ok=True)
    text = msgspec.json.format(msgspec.json.encode(record), indent=1)
    write_synced(directory / BATCH_FILE, text + b"\n")


@dataclass
class _Part:
    """Lines and arrays of a part, collected until they are written."""

    lines: list[bytes] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    logprobs: list[np.ndarray] = field(default_factory=list)
    routes: list[np.ndarray] = field(default_factory=list)
    num_tokens: int = 0
    num_routes: int = 0
    nbytes: int = 0

    def add(self, index: int, group: Group, rollouts: Sequence[Rollout]) -> None:
        """Add a group. rollouts: in the order of `group.rollouts`."""
        records = tuple(
            self._add_rollout(ref, rollout)
            for ref, rollout in zip(group.rollouts, rollouts, strict=True)
        )
        record = GroupRecord(
            index=index,
            group_id=group.group_id,
            prompt=group.prompt,
            rejections=group.rejections,
            rejected_tokens=group.rejected_tokens,
            weight=group.weight,
            prompt_weight=group.prompt_weight,
            generated_at=group.generated_at,
            scored_at=group.scored_at,
            rollouts=records,
            open_samples=group.open_samples,
            environment_error=group.environment_error,
        )
        self.lines.append(msgspec.json.encode(record) + b"\n")

    def write(self, stem: Path) -> None:
        """Write the part's two files. stem: their path without a file extension."""
        arrays = {
            "tokens": np.concatenate(self.tokens or [np.empty(0, np.int32)]),
            "logprobs": np.concatenate(self.logprobs or [np.empty(0, np.float32)]),
        }
        if self.routes:
            arrays["routes"] = np.concatenate(self.routes)
        data = save(arrays, metadata={"format": FORMAT, "version": str(VERSION)})
        write_synced(stem.with_suffix(".safetensors"), data)
        write_synced(stem.with_suffix(".jsonl"), b"".join(self.lines))

    def _add_rollout(self, ref: RolloutRef, rollout: Rollout) -> RolloutRecord:
        first_token = self.num_tokens
        for segment in rollout.segments:
            self._add_segment(segment)
        return RolloutRecord(
            rollout_id=ref.rollout_id,
            sample_index=ref.sample_index,
            finish_reason=ref.finish_reason,
            num_generated=ref.num_generated,
            verdict=ref.verdict,
            tokens=(first_token, self.num_tokens),
            routes=self._add_routes(rollout),
            repetition=ref.repetition,
            is_repetitive=ref.is_repetitive,
            segments=tuple(_segment_record(segment) for segment in rollout.segments),
        )

    def _add_segment(self, segment: Segment) -> None:
        logprobs = segment.logprobs
        if logprobs is None:
            logprobs = np.full(len(segment.tokens), np.nan, np.float32)
        self.tokens.append(np.asarray(segment.tokens, np.int32))
        self.logprobs.append(np.asarray(logprobs, np.float32))
        self.num_tokens += len(segment.tokens)
        self.nbytes += 8 * len(segment.tokens)

    def _add_routes(self, rollout: Rollout) -> tuple[int, int] | None:
        if rollout.routes is None:
            return None
        first = self.num_routes
        self.routes.append(np.asarray(rollout.routes))
        self.num_routes += len(rollout.routes)
        self.nbytes += rollout.routes.nbytes
        return first, self.num_routes


def _segment_record(segment: Segment) -> SegmentRecord:
    return SegmentRecord(
        tokens=len(segment.tokens),
        role=segment.role,
        trainable=segment.trainable,
        has_logprobs=segment.logprobs is not None,
        route_rows=segment.route_rows,
        version=segment.version,
    )
