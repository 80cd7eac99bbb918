"""Model and optimizer through Megatron's dist_checkpointing, in the format that other layouts can read.

Every tensor has the name and the place that it has in the whole model, the optimizer's too (`fully_reshardable`), so
that a checkpoint does not depend on how many ranks saved it. What is no tensor stays out of it, because torch would
unpickle it: the count of optimizer steps is in the run's own state, learning rates follow from the settings, and the
scaling history of FP8 layers (`_extra_state`) starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, merge
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.distributed import DistributedDataParallel

from megatron_rl.mcore.checkpoint.storage import DirectStrategy, check_metadata
from megatron_rl.mcore.optimizer import DistributedAdam

_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_tensors(
    models: Sequence[DistributedDataParallel],
    optimizer: DistributedAdam,
    directory: Path,
    group: dist.ProcessGroup,
) -> None:
    """Collective: write all weights and the optimizer's state into a directory. group: over all ranks, on the CPU.

    Raises `OSError` on rank 0 before others wait for it, or torch's `CheckpointException` on every rank.
    """
    state = _sharded(models, optimizer, loading=False)
    sharded, _ = save_preprocess(state, validate_access_integrity=True)
    shares = parallel_state.get_data_parallel_group(with_context_parallel=True)
    FullyParallelSaveStrategyWrapper(DirectStrategy(group), shares).save(sharded, directory)
    if dist.get_rank() == 0:
        TorchCommonSaveStrategy("torch", 1).save_common({"content_metadata": _CONTENT}, directory)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def load_tensors(
    models: Sequence[DistributedDataParallel], optimizer: DistributedAdam, directory: Path, *, optimizer_steps: int
) -> None:
    """Collective: read weights and the optimizer's state, whatever layout saved them.

    optimizer_steps: how many had been taken. Raises ValueError for files that are not such a checkpoint, and Megatron's
    or torch's `CheckpointingException`, `CheckpointException` for one of another model.
    """
    check_metadata(directory)
    state = _sharded(models, optimizer, loading=True)
    _, plain = extract_sharded_base(state)
    loaded = dist_checkpointing.load(state, str(directory))
    for index, model in enumerate(models):
        _fill(model.module, loaded[_chunk(index)])
    merge(loaded, {"optimizer": plain["optimizer"]})
    optimizer.load(loaded["optimizer"], optimizer_steps)


def _sharded(
    models: Sequence[DistributedDataParallel], optimizer: DistributedAdam, *, loading: bool
) -> ShardedStateDict:
    """This rank's tensors with their places in the whole."""
    chunks: dict[str, Any] = {_chunk(i): model.module.sharded_state_dict() for i, model in enumerate(models)}
    with torch.no_grad():
        state = chunks | {"optimizer": optimizer.sharded_state(chunks, _CONTENT, loading=loading)}
    _, tensors = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    return tensors


def _fill(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError unless these are all of a model's weights."""
    wrong = model.load_state_dict(weights, strict=False)
    missing = [name for name in wrong.missing_keys if not name.endswith("_extra_state")]
    if missing or wrong.unexpected_keys:
        raise ValueError(f"the checkpoint is of another model: it lacks {missing} and has {wrong.unexpected_keys}")


def _chunk(index: int) -> str:
    return f"model{index}"
