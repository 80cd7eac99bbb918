"""Checkpoints with a real state and small files in the place of tensors."""

from pathlib import Path
from typing import Any

from megatron_rl.contracts.run_state import LoopState, PromptCursor, RunState, SelectorState
from megatron_rl.records.durable_files import write_synced
from megatron_rl.run.checkpoints.manifest import Manifest, files_of, record_of, write_manifest
from megatron_rl.run.checkpoints.state_file import NAME, encode_state
from megatron_rl.run.checkpoints.store import CheckpointStore


def make_state(step: int, settings: dict[str, Any] | None = None, **position: Any) -> RunState:
    cursor = PromptCursor(epoch=0, position=16 * step, digest="d")
    return RunState(
        position=LoopState(
            **(
                {
                    "step": step,
                    "version": step,
                    "synced": True,
                    "selection": SelectorState(prompts=cursor),
                }
                | position
            )
        ),
        optimizer_steps=2 * step,
        world_size=1,
        settings=settings or {},
    )


def save_checkpoint(
    shelf: CheckpointStore, step: int, settings: dict[str, Any] | None = None, **position: Any
) -> Path:
    staged = shelf.stage(step)
    write_synced(staged / "tensors", b"tensors of step %d" % step)
    write_synced(staged / NAME, encode_state(make_state(step, settings, **position)))
    files = {name: record_of(staged / name) for name in files_of(staged)}
    write_manifest(staged, Manifest(step=step, files=files))
    return shelf.commit(step)
