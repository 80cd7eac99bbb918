"""The match of saved tensors with the memory that they are read into, without files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_rl.mcore import compat

compat.install()

from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_rl.mcore.checkpoint.tensor_reader import TensorReader


def items(
    saved_rows: int, rows: int, *, chunk_rows: int = 0, has_padding: bool = False
) -> list[Any]:
    """Plan to read the first `rows` of a matrix with two columns.

    chunk_rows: the rows that are on the disk, 0 for all. has_padding: the rows pad a vocabulary.
    """
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([chunk_rows or saved_rows, 2]))
    entry = TensorStorageMetadata(TensorProperties(), torch.Size([saved_rows, 2]), [chunk])
    reader = TensorReader.__new__(TensorReader)
    reader._directory = Path("saved")
    reader._metadata = Metadata({"weight": entry})
    piece: Any = SimpleNamespace(
        key="weight",
        global_shape=(rows, 2),
        local_shape=(rows, 2),
        global_offset=(0, 0),
        prepend_axis_num=0,
        allow_shape_mismatch=has_padding,
    )
    return reader._items(piece)


def test_a_tensor_is_read_as_a_whole() -> None:
    (item,) = items(4, 4)
    assert tuple(item.lengths) == (4, 2)


def test_a_vocabulary_may_have_other_padding() -> None:
    (item,) = items(8, 6, has_padding=True)
    assert tuple(item.lengths) == (6, 2)
    with pytest.raises(ValueError, match=r"of another model: weight has the shape \(8, 2\)"):
        items(8, 6)


def test_a_tensor_of_which_a_part_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="does not hold all of weight"):
        items(4, 4, chunk_rows=3)
