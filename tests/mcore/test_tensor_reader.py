"""The match of saved tensors with the memory that they are read into."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from megatron_rl.mcore.checkpoint.tensor_reader import TensorReader

SAVED = torch.arange(16.0).view(8, 2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint that holds the matrix `SAVED` as `weight`."""
    dcp.save(
        {"weight": SAVED},
        storage_writer=dcp.FileSystemWriter(tmp_path),
        no_dist=True,
    )
    return tmp_path


def read(directory: Path, rows: int, *, name: str = "weight", has_padding: bool = False) -> None:
    """Read the first rows of a matrix with two columns, and compare them with `SAVED`.

    has_padding: the rows pad a vocabulary.
    """
    target = torch.zeros(rows, 2)
    TensorReader(directory).read(
        [ShardedTensor.from_rank_offsets(name, target, allow_shape_mismatch=has_padding)]
    )
    assert torch.equal(target, SAVED[:rows])


def test_a_tensor_is_read_as_a_whole(saved: Path) -> None:
    read(saved, 8)


def test_a_vocabulary_may_have_other_padding(saved: Path) -> None:
    read(saved, 6, has_padding=True)
    with pytest.raises(ValueError, match=r"of another model: weight has the shape \(8, 2\)"):
        read(saved, 6)


def test_a_tensor_that_is_missing_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match="of another model: it holds no bias"):
        read(saved, 8, name="bias")


def test_a_tensor_of_which_a_part_is_missing_is_refused(saved: Path) -> None:
    metadata = dcp.FileSystemReader(saved).read_metadata()
    entry = metadata.state_dict_metadata["weight"]
    assert isinstance(entry, TensorStorageMetadata)
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([7, 2]))]
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match="does not hold all of weight"):
        read(saved, 8)
