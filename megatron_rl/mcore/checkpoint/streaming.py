"""The weights of a checkpoint in Hugging Face format: some parameters at a time, and never the
model in memory.

Invariant: a rank holds at most one bucket and two copies of one parameter
(tests/mcore/test_streaming.py::test_an_export_holds_one_bucket_at_a_time).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.mcore.checkpoint.tensor_reader import TensorReader
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.weights.export import NamedTensors, hf_tensors
from megatron_rl.mcore.weights.parameters import PlacedParameter, placed_parameters
from megatron_rl.models.checkpoint_files import ShardWriter, begin, commit, discard
from megatron_rl.models.shape import ModelShape
from megatron_rl.models.tensor_files import CheckpointError

Bucket = Sequence[PlacedParameter]


class SavedWeights:
    """What a checkpoint holds of a model, whatever layout saved it. Needs a grid without model
    parallelism.

    bucket_bytes: of what `read` holds at once; a larger parameter is a bucket of its own.
    Raises ValueError for a directory that is no checkpoint.
    """

    def __init__(
        self, directory: Path, shape: ModelShape, model: ModelSettings, *, bucket_bytes: int
    ) -> None:
        self._pieces, self._shape = TensorReader(directory), shape
        with torch.device("meta"):  # names, shapes and places alone
            local = replace(
                model, spec="local", fp8=None
            )  # both specs give their tensors the same names here
            models: list[Any] = build_models(shape, local, ParallelSettings(), on_gpu=False)
        self._places: dict[str, Any] = models[0].sharded_state_dict()
        self.buckets = list(_filled(placed_parameters(models, shape), bucket_bytes))

    def all(self, dtype: torch.dtype) -> NamedTensors:
        """Every tensor of the model by its Hugging Face name, as `dtype`; one bucket is in memory."""
        for bucket in self.buckets:
            yield from self.read(bucket, dtype)

    def read(self, bucket: Bucket, dtype: torch.dtype | None = None) -> NamedTensors:
        """Every tensor of a bucket by its Hugging Face name; dtype converts. Raises ValueError for
        another model's.
        """
        weights, wanted = dict[str, torch.Tensor](), list[ShardedTensor]()
        for parameter in bucket:
            weight = torch.empty(parameter.weight.shape, dtype=parameter.weight.dtype, device="cpu")
            weights[parameter.name] = weight
            wanted += _pieces_of(self._places[parameter.name], weight)
        self._pieces.read(wanted)
        wanted.clear()
        del weight
        for parameter in bucket:
            yield from hf_tensors(parameter, 0, weights.pop(parameter.name), self._shape, dtype)


def write_hf(saved: SavedWeights, target: Path, *, source: Path, dtype: torch.dtype) -> None:
    """Collective: the weights as `dtype`, with the tokenizer and configuration of `source`; each
    rank writes its share.

    One file a bucket. Leaves nothing behind when it fails. Raises `CheckpointError` for NaN and
    Inf.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    try:
        if rank == 0:
            begin(target)
        dist.barrier()
        for number in range(rank, len(saved.buckets), ranks):
            writer = ShardWriter(target, f"model-{number:05d}")
            for name, tensor in saved.read(saved.buckets[number], dtype):
                if not tensor.isfinite().all():
                    raise CheckpointError(
                        f"{name} holds NaN or Inf in {dtype}. Choose another checkpoint or --dtype"
                    )
                writer.add(name, tensor)
            writer.close()
        dist.barrier()
        if rank == 0:
            commit(target, source=source, dtype=dtype)
        dist.barrier()
    except BaseException:
        if rank == 0:
            discard(target)
        raise


def _pieces_of(
    place: ShardedTensor | ShardedTensorFactory, weight: torch.Tensor
) -> list[ShardedTensor]:
    """The tensors in the checkpoint that make up a parameter, each with its part of `weight` as the
    data.
    """
    placed = replace(place, data=weight)
    pieces = (
        list(nested_values([placed.build()]))
        if isinstance(placed, ShardedTensorFactory)
        else [placed]
    )
    if any(
        piece.data.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
        for piece in pieces
    ):
        raise ValueError(f"{place.key} is not saved in parts of itself")
    return pieces


def _filled(parameters: Iterator[PlacedParameter], most: int) -> Iterator[Bucket]:
    """Parameters in their order, as many at a time as fit into `most` bytes."""
    bucket, held = list[PlacedParameter](), 0
    for parameter in parameters:
        if parameter.copy:
            continue
        if bucket and held + parameter.weight.nbytes > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += parameter.weight.nbytes
    yield bucket
