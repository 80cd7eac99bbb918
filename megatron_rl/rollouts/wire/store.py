"""Encoded rollouts in anonymous shared memory of a node.

Every process of the same user on the node can read them.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts.wire import codec

NOT_STORED = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


class RolloutGone(Failure):
    """A rollout cannot be read, because its collector ended or released it."""

    exit_code = ExitCode.ENGINE_FAILED


class GroupWriter:
    """Writes the rollouts of one group into shared memory, in any thread.

    It has a descriptor of its own, `stream`, because the store may close its descriptor meanwhile,
    and another file may then get the same number. fd: the number under which others find the
    memory.
    """

    def __init__(self, node: int, fd: int, stream: BinaryIO) -> None:
        self._node = node
        self._fd = fd
        self._stream = stream
        self._offset = 0

    def add(self, rollout: Rollout) -> RolloutLocation:
        """Write one rollout and return its location."""
        data = codec.encode(rollout)
        _write_all(self._stream.fileno(), data)
        location = RolloutLocation(
            node=self._node, pid=os.getpid(), fd=self._fd, offset=self._offset, nbytes=len(data)
        )
        self._offset += len(data)
        return location

    def __enter__(self) -> GroupWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stream.close()


class RolloutStore:
    """Rollouts that this process stores, one memfd a group."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._descriptors: dict[str, int] = {}

    def begin(self, group_id: str) -> GroupWriter:
        """Open memory for a group. `release` frees it, also while it is written.

        Raises ValueError for a group that is stored already.
        """
        if group_id in self._descriptors:
            raise ValueError(f"group {group_id} is stored already: a group is delivered once")
        fd = os.memfd_create(f"rollouts-{group_id}", os.MFD_CLOEXEC)
        self._descriptors[group_id] = fd
        return GroupWriter(self._node, fd, os.fdopen(os.dup(fd), "wb", buffering=0))

    def put(self, group_id: str, rollouts: Iterable[Rollout]) -> list[RolloutLocation]:
        """Store a group's rollouts and return their locations in order.

        Raises ValueError for a group that is stored already.
        """
        with self.begin(group_id) as writer:
            return [writer.add(rollout) for rollout in rollouts]

    def release(self, group_ids: Iterable[str]) -> None:
        """Free the memory of groups. Unknown ids are ignored, so releasing twice is harmless."""
        for group_id in group_ids:
            if (fd := self._descriptors.pop(group_id, None)) is not None:
                os.close(fd)


def make_rollout_ref(
    rollout: Rollout,
    *,
    verdict: Verdict,
    num_generated: int,
    repetition: float,
    is_repetitive: bool = False,
    location: RolloutLocation = NOT_STORED,
) -> RolloutRef:
    """Make the reference to a rollout; see `RolloutRef` for the arguments."""
    tokens_by_version = Counter[int]()
    for segment in rollout.segments:
        if segment.logprobs is not None:
            tokens_by_version[segment.version] += len(segment.tokens)
    return RolloutRef(
        rollout_id=rollout.rollout_id,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        num_inputs=rollout.num_tokens - 1,
        num_trainable=sum(len(s.tokens) for s in rollout.segments if s.trainable),
        num_generated=num_generated,
        repetition=repetition,
        is_repetitive=is_repetitive,
        mean_logprob=_mean_logprob(rollout),
        finish_reason=rollout.finish_reason,
        tokens_by_version=tuple(sorted(tokens_by_version.items())),
        verdict=verdict,
        location=location,
    )


def _mean_logprob(rollout: Rollout) -> float | None:
    logprobs = [s.logprobs for s in rollout.segments if s.logprobs is not None]
    num_sampled = sum(map(len, logprobs))
    return float(sum(map(np.sum, logprobs))) / num_sampled if num_sampled else None


class RolloutReader:
    """Reads rollouts from the memory of collectors on this node.

    It can keep rollouts readable after their collector has ended or released them, until `close`.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], mmap.mmap] = {}  # by process and descriptor

    def keep(self, ref: RolloutRef) -> None:
        """Keep a rollout readable, with the others of its group. Raises `RolloutGone`."""
        location = ref.location
        if (location.pid, location.fd) in self._memory:
            return
        try:
            with _open_memory(location) as stream:
                memory = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise _gone_error(ref, error) from error
        self._memory[location.pid, location.fd] = memory

    def read(self, ref: RolloutRef) -> Rollout:
        """Read one rollout. Raises `RolloutGone` as `read_rollout` does."""
        location = ref.location
        memory = self._memory.get((location.pid, location.fd))
        if memory is None:
            return read_rollout(ref)
        data = bytearray(memory[location.offset : location.offset + location.nbytes])
        try:
            return _decode(ref, data)
        except codec.CodecError as error:
            raise _gone_error(ref, error) from error

    def close(self) -> None:
        """Free the memory."""
        for memory in self._memory.values():
            memory.close()
        self._memory.clear()


def read_rollout(ref: RolloutRef) -> Rollout:
    """Read one rollout from its collector's memory on this node.

    Raises `RolloutGone`, which names the rollout, when the collector has ended or the location
    holds another rollout.
    """
    location = ref.location
    try:
        with _open_memory(location) as stream:
            data = _read_all(stream.fileno(), location.nbytes, location.offset)
        return _decode(ref, data)
    except (OSError, codec.CodecError) as error:
        raise _gone_error(ref, error) from error


def _open_memory(location: RolloutLocation) -> BinaryIO:
    fd = os.open(f"/proc/{location.pid}/fd/{location.fd}", os.O_RDONLY | os.O_CLOEXEC)
    return os.fdopen(fd, "rb", buffering=0)


def _decode(ref: RolloutRef, data: bytearray) -> Rollout:
    """Decode a rollout. Raises `RolloutGone` for another one, and `CodecError`."""
    rollout = codec.decode(data)
    if rollout.rollout_id != ref.rollout_id:
        raise RolloutGone(f"rollout {ref.rollout_id}: its location now holds {rollout.rollout_id}")
    return rollout


def _gone_error(ref: RolloutRef, error: Exception) -> RolloutGone:
    return RolloutGone(f"rollout {ref.rollout_id} cannot be read: {error}")


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, nbytes: int, offset: int) -> bytearray:
    data = bytearray(nbytes)
    position = 0
    while position < nbytes:
        count = os.preadv(fd, [memoryview(data)[position:]], offset + position)
        if count == 0:
            raise OSError(f"{position} of {nbytes} bytes at offset {offset}")
        position += count
    return data
