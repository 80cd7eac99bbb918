"""Saves model and optimizer through Megatron's dist_checkpointing, for any parallel layout.

Every tensor, also of the optimizer (`fully_reshardable`), has its name and place in the whole
model. A checkpoint therefore does not depend on how many ranks saved it.

Only tensors are saved, because torch would unpickle anything else. The count of optimizer steps is
in the run's own state. Learning rates follow from the settings. The scaling history of FP8 layers
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
from megatron.core.dist_checkpointing.strategies.common import save_common
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    determine_main_replica_uniform_distribution,
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.dist_checkpointing.validation import (
    determine_global_metadata,
    validate_sharding_integrity,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_rl.mcore.checkpoint.storage import check_metadata, to_torch_state, write_state
from megatron_rl.mcore.collectives import gather_texts
from megatron_rl.mcore.optimizer import DistributedAdam
from megatron_rl.mcore.weights.parameters import unwrap

_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def gather_tensors(
    models: Sequence[DistributedDataParallel],
    optimizer: DistributedAdam,
    *,
    copy: bool = False,
    check_places: bool = True,
) -> dict[str, Any]:
    """Return this rank's share of all weights and the optimizer's state. Collective.

    The data-parallel ranks share the work of writing.

    copy: copy the tensors to the CPU, so that the model may be trained while they are written.
    check_places: check that the ranks together hold every part of every tensor once. The check
        gathers a description of all tensors on each rank. The places do not change during a run,
        so that one check is enough.

    Returns the argument of `write_tensors`.
    """
    state, _ = save_preprocess(
        _sharded_state(models, optimizer, loading=False), validate_access_integrity=check_places
    )
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    distribute_main_replicas_with_precomputed_distribution(
        state, ranks, determine_main_replica_uniform_distribution(state, ranks)
    )
    if check_places:
        validate_sharding_integrity(determine_global_metadata(state)[1])
    if copy:
        dict_list_map_inplace(_copy_to_cpu, state)
    return to_torch_state(state)


def write_tensors(state: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    """Write every rank's share into a directory. Collective.

    state: the result of `gather_tensors`.
    group: a CPU group of all ranks.

    Raises torch's `CheckpointException` on every rank if one cannot write its share. Raises
    `OSError` on rank 0 if it cannot write the description, when no other rank waits for it.
    """
    write_state(state, directory, group)
    if dist.get_rank() == 0:
        save_common({"content_metadata": _CONTENT}, str(directory))
        save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def load_tensors(
    models: Sequence[DistributedDataParallel],
    optimizer: DistributedAdam,
    directory: Path,
    *,
    optimizer_steps: int,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Load weights and the optimizer's state, whatever layout saved them. Collective.

    optimizer_steps: the number of optimizer steps before the checkpoint.
    group: a CPU group of all ranks. None: this process is the only one.

    Raises ValueError if the directory is no checkpoint of tensors, or one of another model.
    """
    check_metadata(directory)
    state = _sharded_state(models, optimizer, loading=True)
    _, plain_state = extract_sharded_base(state)
    tensors = _read(state, directory, group)
    for index, model in enumerate(models):
        _load_weights(unwrap(model), tensors[_chunk_name(index)])
    merge(tensors, {"optimizer": plain_state["optimizer"]})
    optimizer.load(tensors["optimizer"], optimizer_steps)


def _read(
    state: ShardedStateDict, directory: Path, group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Read a state. Raises ValueError with the errors of all ranks. Collective.

    Every rank reads all parts that it holds. Megatron's `FullyParallelLoadStrategyWrapper` would
    share the reading, but it gathers every part on a CUDA device, which must have room for the
    whole state of the optimizer.
    """
    tensors: dict[str, Any] = {}
    problems: list[str] = []
    try:
        tensors = dist_checkpointing.load(state, str(directory), validate_access_integrity=False)
    except CheckpointException as error:
        # Its own text is a traceback. The first lines name the causes.
        problems = [str(inner).partition("\n")[0] for inner, _ in error.failures.values()]
    except CheckpointingException as error:
        problems = [str(error)]
    # Megatron reads without collectives, so that a rank learns nothing of the others' errors.
    problems = gather_texts(problems, group)
    if problems:
        raise ValueError("; ".join(dict.fromkeys(problems)))
    return tensors


def _sharded_state(
    models: Sequence[DistributedDataParallel], optimizer: DistributedAdam, *, loading: bool
) -> ShardedStateDict:
    """Return this rank's tensors with their places in the whole model. Collective."""
    chunks: dict[str, Any] = {
        _chunk_name(i): model.module.sharded_state_dict() for i, model in enumerate(models)
    }
    with torch.no_grad():
        optimizer_state = optimizer.sharded_state(chunks, _CONTENT, loading=loading)
    state = chunks | {"optimizer": optimizer_state}
    _, tensors = extract_matching_values(state, lambda value: isinstance(value, ShardedObject))
    return tensors


def _copy_to_cpu(value: Any) -> Any:
    """Copy the data of a tensor that this rank will write."""
    is_tensor = isinstance(value, ShardedTensor) and value.data is not None
    if is_tensor and is_main_replica(value.replica_id):
        value.data = value.data.detach().to("cpu", copy=True)
    return value


def _load_weights(model: GPTModel, weights: dict[str, torch.Tensor]) -> None:
    """Load the weights of a chunk. Raises ValueError if some are missing or unexpected.

    model: the model inside Megatron's wrappers, because `Float16Module.load_state_dict` does not
        return the mismatch.
    """
    mismatch = model.load_state_dict(weights, strict=False)
    missing = [name for name in mismatch.missing_keys if not name.endswith("_extra_state")]
    if missing or mismatch.unexpected_keys:
        raise ValueError(
            f"the checkpoint is of another model: it lacks {missing} "
            f"and has {mismatch.unexpected_keys}"
        )


def _chunk_name(index: int) -> str:
    return f"model{index}"
