"""Reads single tensors of a checkpoint into existing memory, by one process without collectives."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from megatron_rl.mcore.checkpoint.storage import check_metadata


class TensorReader:
    """Reads tensors of a checkpoint by their names in the whole model.

    Raises ValueError if the directory is no checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        check_metadata(directory)
        self._directory = directory
        self._reader = FileSystemReader(directory)
        self._metadata: Metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)

    def read(self, pieces: Sequence[ShardedTensor]) -> None:
        """Fill the data of each piece with its part of the whole tensor.

        Raises ValueError if the checkpoint lacks a tensor or holds it in another shape.
        """
        targets = _ReadTargets()
        for piece in pieces:
            targets.add(piece, self._items(piece))
        self._reader.read_data(LoadPlan(targets.items), targets).wait()

    def _items(self, piece: ShardedTensor) -> list[ReadItem]:
        """Return torch's read operations that together fill a piece."""
        metadata = self._metadata.state_dict_metadata.get(piece.key)
        if not isinstance(metadata, TensorStorageMetadata):
            raise ValueError(f"{self._directory} is of another model: it holds no {piece.key}")
        size = tuple(metadata.size)
        # Padded vocabularies may differ in size.
        if size != tuple(piece.global_shape) and not piece.allow_shape_mismatch:
            raise ValueError(
                f"{self._directory} is of another model: {piece.key} has the shape {size}, "
                f"not {piece.global_shape}"
            )
        items = create_read_items_for_chunk_list(piece.key, metadata, [_chunk_of(piece)])
        if sum(math.prod(item.lengths) for item in items) != math.prod(piece.local_shape):
            raise ValueError(f"{self._directory} does not hold all of {piece.key}")
        return items


class _ReadTargets(LoadPlanner):
    """The memory that torch's reader fills, and the plan that it follows."""

    def __init__(self) -> None:
        self.items: list[ReadItem] = []
        self._data: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}

    def add(self, piece: ShardedTensor, items: Sequence[ReadItem]) -> None:
        chunk = _chunk_of(piece)
        assert piece.data is not None
        self._data[piece.key, tuple(chunk.offsets)] = piece.data.view(chunk.sizes)
        self.items += items

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.offset is not None
        target = self._data[index.fqn, tuple(index.offset)]
        spans = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        for axis, (start, length) in enumerate(spans):
            target = target.narrow(axis, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: `resolve_tensor` gave torch the final memory."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")

    def set_up_planner(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: everything is planned before torch's reader is called."""

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan(self.items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan


def _chunk_of(piece: ShardedTensor) -> ChunkStorageMetadata:
    sizes = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    return ChunkStorageMetadata(torch.Size(piece.global_offset), torch.Size(sizes))
