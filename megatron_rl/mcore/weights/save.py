"""Writes a rank's weights as a checkpoint in Hugging Face format."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.mcore.weights.export import iterate_hf_weights
from megatron_rl.models.hf_checkpoint.writer import (
    SHARD_BYTES,
    ShardWriter,
    begin_checkpoint,
    commit_checkpoint,
)
from megatron_rl.models.shape import ModelShape

# Writers may need hours for a large model on a slow file system.
_WRITE_TIMEOUT = datetime.timedelta(hours=6)


def save_hf_weights(
    models: Sequence[torch.nn.Module],
    shape: ModelShape,
    *,
    source: Path,
    target: Path,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights to `target`, with the tokenizer and configuration of `source`. Collective.

    One rank of each pipeline stage writes the weights of its stage. Beside the model it holds one
    shard and one whole parameter, gathered from the ranks that share it.

    dtype: the dtype of the files; frozen weights keep their own.
    shard_bytes: the largest size of a shard; a larger tensor is a shard of its own.
    """
    with open_barrier() as wait_for_all:
        if dist.get_rank() == 0:
            begin_checkpoint(target)
        wait_for_all()
        writer = _open_writer(target, shard_bytes)
        for name, tensor in iterate_hf_weights(models, shape, dtype):
            if writer is not None:
                writer.add(name, tensor)
        if writer is not None:
            writer.close()
        wait_for_all()
        if dist.get_rank() == 0:
            commit_checkpoint(target, source=source, dtype=dtype)
        wait_for_all()


def _open_writer(target: Path, shard_bytes: int) -> ShardWriter | None:
    """Open the writer of this rank's pipeline stage; None if another rank writes the stage."""
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    if replica or parallel_state.get_tensor_model_parallel_rank():
        return None
    stage = parallel_state.get_pipeline_model_parallel_rank()
    return ShardWriter(target, f"model-stage{stage:03d}", shard_bytes)


@contextlib.contextmanager
def open_barrier() -> Iterator[Callable[[], None]]:
    """Yield a barrier of all ranks that waits for hours, because some of them write. Collective.

    It has a group of its own. In another group it would have that group's limit: torch's
    `monitored_barrier` obeys its timeout on rank 0 alone (tests/mcore/slow_commit.py).
    """
    group = dist.new_group(backend="gloo", timeout=_WRITE_TIMEOUT)
    try:
        yield lambda: dist.monitored_barrier(group, _WRITE_TIMEOUT)
    finally:
        dist.destroy_process_group(group)
