"""Writes sharded tensors with torch's own writer, in this process.

Megatron's writer forks a process for each file and starts a manager process. Forking a rank with
threads and sockets may hang, and Megatron waits without limit for a process that the kernel kills.
Errors of torch's writer reach every rank.
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
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from megatron_rl.mcore.seams import by_whole_names

# torch unpickles the data of an entry of `BytesStorageMetadata`, so that this class is not allowed.
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = (
    "Metadata",
    "ChunkStorageMetadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
)
# The (module, name) pairs that torch's metadata refers to.
_ALLOWED_GLOBALS = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),  # the same class in Python 3.13
    *((_METADATA_MODULE, name) for name in _METADATA_CLASSES),
}


def to_torch_state(state: ShardedStateDict) -> dict[str, Any]:
    """Convert this rank's share of Megatron's sharded state to the form of torch's checkpoints."""
    torch_state: dict[str, Any] = mcore_to_pyt_state_dict(by_whole_names(state), False)
    return torch_state


def write_state(state: dict[str, Any], directory: Path, group: dist.ProcessGroup) -> None:
    """Write a state of `to_torch_state` in Megatron's `torch_dist` format. Collective.

    group: a CPU group of all ranks.

    Raises torch's `CheckpointException` on every rank when one cannot write.
    """
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(directory, sync_files=True),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        process_group=group,
    )


class _SafeUnpickler(pickle.Unpickler):
    """Unpickles torch's `.metadata`, and refuses every class that metadata does not need."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED_GLOBALS:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def check_metadata(checkpoint: Path) -> None:
    """Raise ValueError unless `.metadata`, which torch unpickles, describes tensors alone."""
    file = checkpoint / ".metadata"
    try:
        with file.open("rb") as stream:
            metadata = _SafeUnpickler(stream).load()
        _require_tensors(metadata)
    except Exception as error:  # a damaged pickle may raise anything
        raise ValueError(f"{file} is not the metadata of tensors: {error}") from error


def _require_tensors(metadata: Any) -> None:
    """Raise TypeError unless every entry is a tensor, because torch unpickles all other data."""
    if type(metadata) is not Metadata:
        raise TypeError(f"it holds a {type(metadata).__name__}")
    for name, entry in metadata.state_dict_metadata.items():
        if type(entry) is not TensorStorageMetadata:
            raise TypeError(f"its entry {name} is a {type(entry).__name__}, not a tensor")
