"""Rollouts in a file, for scripts that run under torchrun."""

from pathlib import Path

from megatron_rl.contracts.rollout import Rollout
from megatron_rl.rollouts import codec


def write_rollouts(file: Path, rollouts: list[Rollout]) -> None:
    with file.open("wb") as out:
        for rollout in rollouts:
            data = codec.encode(rollout)
            out.write(len(data).to_bytes(8, "little") + data)


def read_rollouts(file: Path) -> list[Rollout]:
    data, position, rollouts = file.read_bytes(), 0, []
    while position < len(data):
        length = int.from_bytes(data[position : position + 8], "little")
        rollouts.append(codec.decode(data[position + 8 : position + 8 + length]))
        position += 8 + length
    return rollouts
