"""Encoded rollouts in anonymous shared memory of a node.

Every process of the same user on the node can read them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable

import numpy as np

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.group import RolloutLocation, RolloutRef, Verdict
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts import codec

NOT_STORED = RolloutLocation(node=0, pid=0, fd=0, offset=0, nbytes=0)


class RolloutGone(Failure):
    """A rollout cannot be read, because its collector ended or released it."""

    exit_code = ExitCode.ENGINE_FAILED


class RolloutStore:
    """Rollouts that this process stores, one memfd a group."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._descriptors: dict[str, int] = {}

    def put(self, group_id: str, rollouts: Iterable[Rollout]) -> list[RolloutLocation]:
        """Store a group's rollouts and return their locations in order.

        Raises ValueError for a group that is stored already.
        """
        if group_id in self._descriptors:
            raise ValueError(f"group {group_id} is stored already: a group is delivered once")
        fd = os.memfd_create(f"rollouts-{group_id}", os.MFD_CLOEXEC)
        self._descriptors[group_id] = fd
        locations = []
        offset = 0
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


def read_rollout(ref: RolloutRef) -> Rollout:
    """Read one rollout from its collector's memory on this node.

    Raises `RolloutGone`, which names the rollout, when the collector has ended or the location
    holds another rollout.
    """
    location = ref.location
    try:
        fd = os.open(f"/proc/{location.pid}/fd/{location.fd}", os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb", buffering=0):
            data = _read_all(fd, location.nbytes, location.offset)
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
    data = bytearray(nbytes)
    position = 0
    while position < nbytes:
        count = os.preadv(fd, [memoryview(data)[position:]], offset + position)
        if count == 0:
            raise OSError(f"{position} of {nbytes} bytes at offset {offset}")
        position += count
    return data
