"""Model and optimizer through Megatron's dist_checkpointing, in the format that other layouts can
read.

Every tensor has the name and the place that it has in the whole model, the optimizer's too
(`fully_reshardable`), so that a checkpoint does not depend on how many ranks saved it. What is no
tensor stays out of it, because torch would unpickle it: the count of optimizer steps is in the
run's own state, learning rates follow from the settings, and the scaling history of FP8 layers
(`_extra_state`) starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.distributed import DistributedDataParallel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.mcore.checkpoint.storage import as_torch, check_metadata, write_state
from megatron_rl.mcore.optimizer import DistributedAdam

_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def gather_tensors(
    models: Sequence[DistributedDataParallel], optimizer: DistributedAdam, *, copy: bool = False
) -> dict[str, Any]:
    """Collective: this rank's share of all weights and the optimizer's state, for `write_tensors`.

    copy: apart from the model, which may be trained meanwhile.
    """
    sharded, _ = save_preprocess(
        _sharded(models, optimizer, loading=False), validate_access_integrity=True
    )
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    writer = TorchDistSaveShardedStrategy("torch_dist", 1)
    FullyParallelSaveStrategyWrapper(writer, ranks).apply_saving_parallelization(sharded)
    if copy:
        dict_list_map_inplace(_copied, sharded)
    return as_torch(sharded)


def write_tensors(state: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    """Collective: write every rank's share into a directory. group: over all ranks, on the CPU.

    Raises torch's `CheckpointException` on every rank, or `OSError` on rank 0, which nobody waits
    for by then.
    """
    write_state(state, directory, group)
    if dist.get_rank() == 0:
        TorchCommonSaveStrategy("torch", 1).save_common({"content_metadata": _CONTENT}, directory)
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def load_tensors(
    models: Sequence[DistributedDataParallel],
    optimizer: DistributedAdam,
    directory: Path,
    *,
    optimizer_steps: int,
) -> None:
    """Collective: read weights and the optimizer's state, whatever layout saved them.

    optimizer_steps: how many had been taken. Raises ValueError for files that are not such a
    checkpoint, and for one of another model.
    """
    check_metadata(directory)
    state = _sharded(models, optimizer, loading=True)
    _, plain = extract_sharded_base(state)
    try:
        loaded = dist_checkpointing.load(state, str(directory))
    except CheckpointException as error:  # its own text is a traceback for each rank
        found = (str(inner).partition("\n")[0] for inner, _ in error.failures.values())
        raise ValueError("; ".join(dict.fromkeys(found))) from error
    except CheckpointingException as error:
        raise ValueError(str(error)) from error
    for index, model in enumerate(models):
        _fill(model.module, loaded[_chunk(index)])
    merge(loaded, {"optimizer": plain["optimizer"]})
    optimizer.load(loaded["optimizer"], optimizer_steps)


def _sharded(
    models: Sequence[DistributedDataParallel], optimizer: DistributedAdam, *, loading: bool
) -> ShardedStateDict:
    """This rank's tensors with their places in the whole."""
    chunks: dict[str, Any] = {
        _chunk(i): model.module.sharded_state_dict() for i, model in enumerate(models)
    }
    with torch.no_grad():
        state = chunks | {"optimizer": optimizer.sharded_state(chunks, _CONTENT, loading=loading)}
    _, tensors = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    return tensors


def _copied(value: Any) -> Any:
    if (
        isinstance(value, ShardedTensor)
        and value.data is not None
        and is_main_replica(value.replica_id)
    ):
        value.data = value.data.detach().to("cpu", copy=True)
    return value


def _fill(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Raises ValueError unless these are all of a model's weights."""
    wrong = model.load_state_dict(weights, strict=False)
    missing = [name for name in wrong.missing_keys if not name.endswith("_extra_state")]
    if missing or wrong.unexpected_keys:
        raise ValueError(
            f"the checkpoint is of another model: it lacks {missing} and has {wrong.unexpected_keys}"
        )


def _chunk(index: int) -> str:
    return f"model{index}"
