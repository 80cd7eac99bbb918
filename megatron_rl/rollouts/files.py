"""Rollouts in a file: 8-byte little-endian lengths, each followed by one encoded rollout
(`rollouts.codec`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts import codec


def write_rollouts(file: Path, rollouts: Iterable[Rollout]) -> None:
    """Write rollouts one after the other; the file's folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as out:
        for rollout in rollouts:
            data = codec.encode(rollout)
            out.write(len(data).to_bytes(8, "little") + data)


def read_rollouts(file: Path) -> list[Rollout]:
    """All rollouts of a file, in order.

    Raises `CodecError` for one that is cut or something else.
    """
    data, position, rollouts = file.read_bytes(), 0, []
    while position < len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        rollouts.append(codec.decode(data[position + 8 : position + 8 + length]))
        position += 8 + length
    return rollouts
