"""Encoded rollouts in anonymous shared memory, readable by every process of the same user on the
node.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import RolloutLocation, RolloutRef
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts import codec


class RolloutGone(Failure):
    """A rollout can no longer be read: its collector ended or released it."""

    exit_code = ExitCode.ENGINE_FAILED


class RolloutStore:
    """The collector's side: one memfd a group."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._segments: dict[str, int] = {}

    def put(self, group_id: str, rollouts: Iterable[Rollout]) -> list[RolloutLocation]:
        """Store a group's rollouts and return where each lies, in order."""
        if group_id in self._segments:
            raise ValueError(f"group {group_id} is stored already: a group is delivered once")
        fd = os.memfd_create(f"rollouts-{group_id}", os.MFD_CLOEXEC)
        self._segments[group_id] = fd
        locations, offset = [], 0
        for rollout in rollouts:
            data = codec.encode(rollout)
            _write_all(fd, data)
            locations.append(
                RolloutLocation(
                    node=self._node, pid=os.getpid(), fd=fd, offset=offset, nbytes=len(data)
                )
            )
            offset += len(data)
        return locations

    def release(self, group_ids: Iterable[str]) -> None:
        """Free the memory of groups; unknown ids are ignored, so that releasing twice is harmless."""
        for group_id in group_ids:
            if (fd := self._segments.pop(group_id, None)) is not None:
                os.close(fd)


def read_rollout(ref: RolloutRef) -> Rollout:
    """Read one rollout from its collector's memory on this node.

    Raises `RolloutGone`, which names the rollout, when the collector has ended or the location is
    stale.
    """
    where = ref.location
    try:
        fd = os.open(f"/proc/{where.pid}/fd/{where.fd}", os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0):
            data = _read_all(fd, where.nbytes, where.offset)
        rollout = codec.decode(data)
    except (OSError, codec.CodecError) as error:
        raise RolloutGone(f"rollout {ref.rollout_id} cannot be read: {error}") from error
    if rollout.rollout_id != ref.rollout_id:
        raise RolloutGone(f"rollout {ref.rollout_id}: its location now holds {rollout.rollout_id}")
    return rollout


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _read_all(fd: int, nbytes: int, offset: int) -> bytearray:
    data, filled = bytearray(nbytes), 0
    while filled < nbytes:
        count = os.preadv(fd, [memoryview(data)[filled:]], offset + filled)
        if count == 0:
            raise OSError(f"{filled} of {nbytes} bytes at offset {offset}")
        filled += count
    return data
