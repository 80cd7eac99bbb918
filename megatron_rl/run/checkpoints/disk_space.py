"""Room on the disk for what a run will write, asked for before it starts."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.models.parameter_count import num_parameters
from megatron_rl.models.shape import ModelShape
from megatron_rl.planning.memory import BYTES
from megatron_rl.records.write_errors import free_bytes

_RECORDS_BYTES = 32 * 2**20  # metrics, logs, TensorBoard
_MIB = 2**20


class NotEnoughDiskSpace(Failure):
    """What the run will write does not fit on its disk."""

    exit_code = ExitCode.CANNOT_WRITE


def checkpoint_bytes(c: Configuration, shape: ModelShape) -> int:
    """What one checkpoint takes: the weights, and in float32 the optimizer's weights and two
    moments.
    """
    return num_parameters(shape) * (BYTES[c.model.dtype] + 3 * BYTES["float32"])


def required_bytes(c: Configuration, shape: ModelShape) -> dict[str, int]:
    """What a run writes at most at one time, by the key that asks for it."""
    parameters = num_parameters(shape)
    needed = {"run.root (metrics and logs)": _RECORDS_BYTES}
    if c.run.save_weights:  # twice: a checkpoint is replaced only once the new one is whole
        needed["run.save_weights=true"] = 2 * parameters * BYTES[c.run.save_dtype or c.model.dtype]
    if c.run.checkpoint_every:  # a new one is whole before the oldest is removed
        needed["run.checkpoint_every"] = (c.run.keep_checkpoints + 1) * checkpoint_bytes(c, shape)
    if c.sync.transport == "disk":
        needed["sync.transport=disk"] = parameters * BYTES[c.engine.dtype]
    return needed


def require_disk_space(c: Configuration, shape: ModelShape) -> None:
    """Raises `NotEnoughDiskSpace` when the disk of `run.root` has less room than the run will need."""
    free, needed = free_bytes(Path(c.run.root).expanduser().resolve()), required_bytes(c, shape)
    if free >= sum(needed.values()):
        return
    parts = ", ".join(f"{size / _MIB:,.0f} MiB for {key}" for key, size in needed.items())
    raise NotEnoughDiskSpace(
        f"run.root={c.run.root!r}: {free / _MIB:,.0f} MiB are free on its disk, and the run may need {parts}; make "
        "room, give another run.root, or use run.save_weights=false"
    )
