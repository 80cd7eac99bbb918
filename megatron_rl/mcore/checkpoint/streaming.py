"""Reads the weights of a checkpoint in Hugging Face format, a few parameters at a time.

The model is never in memory as a whole. A rank holds at most one bucket and two copies of one
parameter (tests/mcore/test_streaming.py::test_export_holds_one_bucket_at_a_time).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_rl.config.schema import ModelSettings, ParallelSettings
from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.mcore.checkpoint.tensor_reader import TensorReader
from megatron_rl.mcore.model import build_models
from megatron_rl.mcore.weights.export import NamedTensors, hf_tensors
from megatron_rl.mcore.weights.fp8_weights import quantize_weights
from megatron_rl.mcore.weights.parameters import (
    PlacedParameter,
    in_update_order,
    placed_parameters,
)
from megatron_rl.mcore.weights.save import open_barrier
from megatron_rl.models.fp8_weights import Fp8Weights
from megatron_rl.models.hf_checkpoint.writer import (
    ShardWriter,
    begin_checkpoint,
    commit_checkpoint,
    discard_checkpoint,
)
from megatron_rl.models.shape import ModelShape

Bucket = Sequence[PlacedParameter]


class SavedWeights:
    """The weights of a checkpoint, whatever layout saved it.

    It needs Megatron's process groups without model parallelism.

    directory: the checkpoint.
    shape, model: the model that it was saved from.
    bucket_bytes: the size of the parameters that `read` holds at once. A larger parameter is a
        bucket of its own.

    Raises ValueError if the directory is no checkpoint.
    """

    def __init__(
        self, directory: Path, shape: ModelShape, model: ModelSettings, *, bucket_bytes: int
    ) -> None:
        self._reader = TensorReader(directory)
        self._shape = shape
        # Both specs give their tensors the same names in checkpoints.
        local_model = replace(model, spec="local", fp8=None)
        with torch.device("meta"):  # only names, shapes and places are needed
            models: list[Any] = build_models(shape, local_model, ParallelSettings(), on_gpu=False)
        self._places: dict[str, Any] = models[0].sharded_state_dict()
        parameters = in_update_order(placed_parameters(models, shape))
        self.buckets = list(_fill_buckets(parameters, bucket_bytes))

    def all(self, dtype: torch.dtype) -> NamedTensors:
        """Yield every tensor of the model by its Hugging Face name, as `dtype`.

        Frozen weights keep their dtype. One bucket is in memory at a time.
        """
        for bucket in self.buckets:
            yield from self.read(bucket, dtype)

    def read(self, bucket: Bucket, dtype: torch.dtype | None = None) -> NamedTensors:
        """Yield every tensor of a bucket by its Hugging Face name.

        dtype: converts weights that are trained; None keeps their dtype.

        Raises ValueError if the checkpoint is of another model.
        """
        weights: dict[str, torch.Tensor] = {}
        pieces: list[ShardedTensor] = []
        for parameter in bucket:
            weight = torch.empty(parameter.weight.shape, dtype=parameter.weight.dtype, device="cpu")
            weights[parameter.name] = weight
            pieces += _pieces_of(self._places[parameter.name], weight)
        self._reader.read(pieces)
        # Only `weights` may keep the tensors alive, so that each is freed after it is yielded.
        pieces.clear()
        del weight
        for parameter in bucket:
            yield from hf_tensors(parameter, 0, weights.pop(parameter.name), self._shape, dtype)


def write_hf(
    weights: SavedWeights,
    target: Path,
    *,
    source: Path,
    dtype: torch.dtype,
    names: Fp8Weights | None = None,
    quantization: Mapping[str, Any] | None = None,
) -> None:
    """Write the weights in Hugging Face format to `target`, one file for each bucket. Collective.

    The ranks share the buckets. A failure leaves nothing behind.

    source: the directory with the tokenizer and configuration.
    dtype: the dtype of the files; frozen weights keep their own. Quantized weights are rounded to
        it first, as for engines.
    names: the tensors to quantize, None for none.
    quantization: their `quantization_config`, which config.json gets.

    Raises `Failure` for NaN and Inf.
    """
    rank = dist.get_rank()
    try:
        with open_barrier() as wait_for_all:
            if rank == 0:
                begin_checkpoint(target)
            wait_for_all()
            for number in range(rank, len(weights.buckets), dist.get_world_size()):
                _write_bucket(weights, number, target, dtype, names)
            wait_for_all()
            if rank == 0:
                changes = {} if quantization is None else {"quantization_config": quantization}
                commit_checkpoint(target, source=source, dtype=dtype, changes=changes)
            wait_for_all()
    except BaseException:
        if rank == 0:
            discard_checkpoint(target)
        raise


def _write_bucket(
    weights: SavedWeights,
    number: int,
    target: Path,
    dtype: torch.dtype,
    names: Fp8Weights | None,
) -> None:
    """Write a bucket as a file. Raises `Failure` for NaN and Inf."""
    writer = ShardWriter(target, f"model-{number:05d}")
    tensors = _finite(weights.read(weights.buckets[number], dtype), dtype)
    for name, tensor in tensors if names is None else quantize_weights(tensors, names):
        writer.add(name, tensor)
    writer.close()


def _finite(tensors: NamedTensors, dtype: torch.dtype) -> NamedTensors:
    for name, tensor in tensors:
        _require_finite(name, tensor, dtype)
        yield name, tensor


def _require_finite(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if not tensor.isfinite().all():
        raise Failure(
            f"{name} holds NaN or Inf in {dtype}. Choose another checkpoint or --dtype",
            ExitCode.BAD_DATA,
        )


def _pieces_of(
    place: ShardedTensor | ShardedTensorFactory, weight: torch.Tensor
) -> list[ShardedTensor]:
    """Return the tensors of the checkpoint that make up a parameter.

    The data of each is a view of its part of `weight`. Raises ValueError if one is not.
    """
    parameter = replace(place, data=weight)
    pieces = [parameter]
    if isinstance(parameter, ShardedTensorFactory):
        pieces = list(nested_values([parameter.build()]))
    storage = weight.untyped_storage().data_ptr()
    if any(piece.data.untyped_storage().data_ptr() != storage for piece in pieces):
        raise ValueError(f"{place.key} is not saved in parts of itself")
    return pieces


def _fill_buckets(parameters: Iterable[PlacedParameter], bucket_bytes: int) -> Iterator[Bucket]:
    """Group parameters in their order into buckets of at most `bucket_bytes`."""
    bucket: list[PlacedParameter] = []
    size = 0
    for parameter in parameters:
        if bucket and size + parameter.weight.nbytes > bucket_bytes:
            yield bucket
            bucket = []
            size = 0
        bucket.append(parameter)
        size += parameter.weight.nbytes
    yield bucket
