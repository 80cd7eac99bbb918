"""Checkpoints with a real state, and small files instead of tensors."""

from pathlib import Path
from typing import Any

from megatron_rl.contracts.run_state import LoopState, PromptCursor, RunState, SelectorState
from megatron_rl.records.durable_files import write_synced
from megatron_rl.run.checkpoints.manifest import (
    Manifest,
    hash_file,
    list_files,
    write_manifest,
)
from megatron_rl.run.checkpoints.state_file import STATE_NAME, encode_state
from megatron_rl.run.checkpoints.store import CheckpointStore


def make_state(step: int, settings: dict[str, Any] | None = None, **position: Any) -> RunState:
    """position: fields of `LoopState` that differ from the defaults here."""
    cursor = PromptCursor(epoch=0, position=16 * step, digest="d")
    defaults = {
        "step": step,
        "version": step,
        "weights_synced": True,
        "selection": SelectorState(prompts=cursor),
    }
    return RunState(
        position=LoopState(**(defaults | position)),
        optimizer_steps=2 * step,
        world_size=1,
        settings=settings or {},
    )


def save_checkpoint(
    store: CheckpointStore, step: int, settings: dict[str, Any] | None = None, **position: Any
) -> Path:
    """Save and commit a checkpoint. Returns its path."""
    staging = store.create_staging(step)
    write_synced(staging / "tensors", b"tensors of step %d" % step)
    write_synced(staging / STATE_NAME, encode_state(make_state(step, settings, **position)))
    files = {name: hash_file(staging / name) for name in list_files(staging)}
    write_manifest(staging, Manifest(step=step, files=files))
    return store.commit(step)


def flip_bit(file: Path, index: int = 0) -> None:
    """Damage one byte of a file."""
    data = bytearray(file.read_bytes())
    data[index] ^= 1
    file.write_bytes(data)
