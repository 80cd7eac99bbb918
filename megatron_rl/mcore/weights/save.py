"""Writes a rank's weights as a checkpoint in Hugging Face format."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
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
    group: dist.ProcessGroup | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights to `target`, with the tokenizer and configuration of `source`. Collective.

    One rank of each pipeline stage writes the weights of its stage. Beside the model it holds one
    shard and one whole parameter, gathered from the ranks that share it.

    dtype: the dtype of the files; frozen weights keep their own.
    group: a gloo group of all ranks, in which they wait for the writers. The groups of the model
        have shorter limits. None for the default group, where that uses gloo.
    shard_bytes: the largest size of a shard; a larger tensor is a shard of its own.
    """
    if dist.get_rank() == 0:
        begin_checkpoint(target)
    _wait(group)
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    is_writer = replica == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    stage = parallel_state.get_pipeline_model_parallel_rank()
    writer = ShardWriter(target, f"model-stage{stage:03d}", shard_bytes) if is_writer else None
    for name, tensor in iterate_hf_weights(models, shape, dtype):
        if writer is not None:
            writer.add(name, tensor)
    if writer is not None:
        writer.close()
    _wait(group)
    if dist.get_rank() == 0:
        commit_checkpoint(target, source=source, dtype=dtype)
    _wait(group)


def _wait(group: dist.ProcessGroup | None) -> None:
    """Wait for all ranks. Collective."""
    dist.monitored_barrier(group=group, timeout=_WRITE_TIMEOUT)
