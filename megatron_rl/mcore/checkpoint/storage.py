"""How tensors reach the disk: by torch's own writer, in this process, and with errors that every
rank hears of.

Megatron's writer forks a process for each file and starts a manager process; a fork of a rank with
threads and sockets may hang, and one that the kernel kills is waited for without an end.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

_METADATA = "torch.distributed.checkpoint.metadata"
_CLASSES = (
    "Metadata BytesStorageMetadata ChunkStorageMetadata TensorStorageMetadata TensorProperties MetadataIndex "
    "StorageMeta _MEM_FORMAT_ENCODING"
)
_NEEDED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # what Python 3.13 calls it
    *((_METADATA, name) for name in _CLASSES.split()),
}


def as_torch(sharded: ShardedStateDict) -> dict[str, Any]:
    """What this rank writes of a sharded state, as torch's checkpoints take it."""
    tensors, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded, True)
    state: dict[str, Any] = mcore_to_pyt_state_dict(tensors, False)
    return state


def write_state(state: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    """Collective, in Megatron's `torch_dist` format. group: over all ranks, on the CPU.

    Raises torch's `CheckpointException` on every rank when one cannot write.
    """
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(directory, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        process_group=group,
    )


class _SafeUnpickler(pickle.Unpickler):
    """Reads the pickle of torch's `.metadata`, and refuses to look up anything but its own classes."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _NEEDED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def check_metadata(checkpoint: Path) -> None:
    """Raise ValueError unless `.metadata`, which torch unpickles, holds metadata and nothing else."""
    try:
        with (checkpoint / ".metadata").open("rb") as stream:
            _SafeUnpickler(stream).load()
    except Exception as error:  # a damaged pickle raises anything
        raise ValueError(
            f"{checkpoint / '.metadata'} is not the metadata of tensors: {error}"
        ) from error
