"""Iterates over the tensors that this rank sends to engines, and over all of them on rank 0."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.mcore.job import Job
from megatron_rl.mcore.weights.layout import split
from megatron_rl.mcore.weights.owners import (
    Grid,
    Owner,
    Unit,
    collectors_of_stage,
    owners_of_stage,
)
from megatron_rl.mcore.weights.parameters import PlacedParameter, placed_parameters
from megatron_rl.mcore.weights.rank_stream import (
    receive_tensors,
    send_tensors,
    share_number,
    share_tensors,
)
from megatron_rl.models.names import Fusion
from megatron_rl.models.shape import ModelShape
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.fused_layout import update_unit
from sglang_bridge.weights.source import StreamWatch

Transform = Callable[[NamedTensors], NamedTensors]


@dataclass(frozen=True)
class OwnedWeights:
    """The weights of a model as its ranks send them to engines.

    Each tensor has one owner. Shards go to the owner alone, and experts to nobody else.

    models: this rank's chunks. dtype: converts weights that are trained; frozen weights keep their
    dtype. transform: changes the tensors that an owner sends, one by one: it simulates or applies
    quantization. complete: passes on all tensors, and checks that none is missing. bucket_bytes: of
    the buckets to rank 0.
    """

    models: Sequence[torch.nn.Module]
    shape: ModelShape
    job: Job
    dtype: torch.dtype | None
    transform: Transform
    bucket_bytes: int
    complete: Transform = iter
    _watch: StreamWatch = field(default_factory=StreamWatch, init=False, repr=False)

    @property
    def owns_any(self) -> bool:
        """True if this rank has tensors to send."""
        return any(owner.rank == self.job.rank for owner in self._owners.values())

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of the last `stream_owned`: for gathering shards, and for `transform`."""
        return self._watch.seconds

    def stream_owned(self) -> NamedTensors:
        """Yield the tensors that this rank owns, as views where it holds them whole.

        Collective over tensor-parallel groups: all ranks must exhaust it.
        """
        self._watch.seconds.clear()
        tensors = self._watch.measure("gather", self._tensors(self._units, self._owners))
        return self._watch.measure("quantise", self.transform(tensors))

    def stream_all(self) -> NamedTensors:
        """Yield all tensors on rank 0, without holding more than a bucket, and none elsewhere.

        A collective. The tensors of one parameter of an engine come in its order: first the stage's
        tensors outside experts, then the experts of each expert-parallel rank.
        """
        tensors = self._stream_parts()
        return self.complete(tensors) if self.job.rank == 0 else tensors

    @property
    def unit_bytes(self) -> int:
        """The largest unit of this rank's pipeline stage."""
        return max(unit.num_bytes for unit in self._units)

    def stream_everywhere(self) -> NamedTensors:
        """Yield all tensors on every rank, in the order of `stream_all`.

        A collective, in step: all ranks wait for each other before each bucket. A rank holds the
        shards and the tensors of a bucket, and the bucket itself, twice where a tensor is shared.
        """
        self._watch.seconds.clear()
        grid = _grid(self.job)
        parts = (
            self._share_part(grid, stage, ep_rank)
            for stage in range(grid.pp)
            for ep_rank in (None, *range(grid.ep))
        )
        tensors = (item for part in parts for item in part)
        return self._watch.measure("gather", self.complete(tensors))

    def _share_part(self, grid: Grid, stage: int, ep_rank: int | None) -> NamedTensors:
        source = self._source(grid, stage, ep_rank)
        part: dict[Unit, list[PlacedParameter]] = {}
        if stage == _stage():
            part = {
                unit: members for unit, members in self._units.items() if unit.ep_rank == ep_rank
            }
        batches = list(_batches(part, self.bucket_bytes))
        collectors = collectors_of_stage(part, grid, stage) if part else {}
        # Ranks of other stages do not know how many
        for index in range(share_number(len(batches), source, self.job)):
            batch = batches[index] if batches else {}
            # Whole before it travels: a rank that waits for a bucket cannot gather meanwhile
            tensors = list(self.transform(self._tensors(batch, collectors)))
            size = self.bucket_bytes
            yield from share_tensors(tensors, source, self.job, bucket_bytes=size)

    def _source(self, grid: Grid, stage: int, ep_rank: int | None) -> int:
        """The rank that collects a part of a stage."""
        holders = grid.dense_holders(stage)
        if ep_rank is not None:
            holders = grid.expert_holders(stage, ep_rank)
        return holders[0][0]

    def _stream_parts(self) -> NamedTensors:
        grid = _grid(self.job)
        for stage in range(grid.pp):
            for ep_rank in (None, *range(grid.ep)):
                yield from self._stream_part(grid, stage, ep_rank)

    def _stream_part(self, grid: Grid, stage: int, ep_rank: int | None) -> NamedTensors:
        source = self._source(grid, stage, ep_rank)
        tensors: NamedTensors = iter(())
        if stage == _stage():
            part = {
                unit: members for unit, members in self._units.items() if unit.ep_rank == ep_rank
            }
            tensors = self.transform(self._tensors(part, collectors_of_stage(part, grid, stage)))
        if source == 0:
            yield from tensors  # none on the other ranks
        elif self.job.rank == source:
            send_tensors(tensors, self.job, bucket_bytes=self.bucket_bytes)
        elif self.job.rank == 0:
            yield from receive_tensors(source, self.job)
        else:
            yield from tensors  # none, but its shards go to the source

    @functools.cached_property
    def _owners(self) -> dict[str, Owner]:
        return owners_of_stage(self._units, _grid(self.job), _stage())

    @functools.cached_property
    def _units(self) -> dict[Unit, list[PlacedParameter]]:
        """This rank's parameters by unit, and the units that other ranks of the stage hold."""
        ep_size = parallel_state.get_expert_model_parallel_world_size()
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        parameters: dict[tuple[str, int | None], list[PlacedParameter]] = {}
        num_bytes: dict[tuple[str, int | None], int] = {}
        for parameter in placed_parameters(self.models, self.shape):
            if parameter.is_tied_copy:
                continue
            is_expert = parameter.layout(0).expert is not None
            for other in range(ep_size) if is_expert else (None,):
                layout = parameter.layout(other or 0)
                key = (update_unit(layout.hf_names[0]), other)
                size = parameter.num_whole_bytes(layout, self.dtype)
                num_bytes[key] = num_bytes.get(key, 0) + size
                members = parameters.setdefault(key, [])
                if other in (None, ep_rank):
                    members.append(parameter)
        return {
            Unit(name, num_bytes[name, other], other): members
            for (name, other), members in parameters.items()
        }

    @torch.no_grad()
    def _tensors(
        self, units: Mapping[Unit, list[PlacedParameter]], owners: Mapping[str, Owner]
    ) -> NamedTensors:
        rank = self.job.rank
        for unit, parameters in units.items():
            owner = owners[unit.key]
            if rank not in owner.shards:
                continue
            for parameter in parameters:
                yield from self._tensors_of(parameter, unit, owner)

    def _tensors_of(self, parameter: PlacedParameter, unit: Unit, owner: Owner) -> NamedTensors:
        """Yield the tensors of a parameter on its owner, part by part. Shards are converted first.

        Converting and gathering commute, and this moves and holds fewer bytes.
        """
        layout = parameter.layout(unit.ep_rank or 0)
        is_whole = layout.fusion is Fusion.REPLICATED or len(owner.shards) == 1
        if is_whole and owner.rank != self.job.rank:
            return
        parts = split(layout.fusion, parameter.weight.detach(), self.shape)
        for name, part in zip(layout.hf_names, parts, strict=True):
            tensor: torch.Tensor | None = parameter.convert(part, self.dtype)
            if tensor is not None and not is_whole:
                axis = 1 if layout.fusion is Fusion.COLUMNS else 0
                tensor = _gather(tensor, axis, owner, unit)
            if tensor is None:
                continue
            if layout.fusion is Fusion.VOCABULARY:
                tensor = tensor[: self.shape.vocab_size]
            yield name, tensor


def _batches(
    units: Mapping[Unit, list[PlacedParameter]], num_bytes: int
) -> Iterator[dict[Unit, list[PlacedParameter]]]:
    """Cut units into batches of at most `num_bytes`; a larger unit is a batch of its own.

    All ranks of a pipeline stage cut in the same places.
    """
    batch: dict[Unit, list[PlacedParameter]] = {}
    total = 0
    for unit, members in units.items():
        if batch and total + unit.num_bytes > num_bytes:
            yield batch
            batch = {}
            total = 0
        batch[unit] = members
        total += unit.num_bytes
    if batch:
        yield batch


def _gather(shard: torch.Tensor, axis: int, owner: Owner, unit: Unit) -> torch.Tensor | None:
    """Join shards on the owner; None on the other ranks. A collective of the owner's group.

    axis: 0 joins rows without a second copy, 1 columns with one.
    """
    if unit.ep_rank is None:
        group = parallel_state.get_tensor_model_parallel_group()
    else:
        group = parallel_state.get_expert_tensor_parallel_group()
    shard = shard.contiguous()
    if dist.get_rank() != owner.rank:
        dist.gather(shard, dst=owner.rank, group=group)
        return None
    size = len(owner.shards)
    whole = shard.new_empty(size * shard.shape[0], *shard.shape[1:])
    shards = list(whole.chunk(size))
    dist.gather(shard, shards, dst=owner.rank, group=group)
    return whole if axis == 0 else torch.cat(shards, dim=1)


def _grid(job: Job) -> Grid:
    return Grid(
        job.world_size,
        tp=parallel_state.get_tensor_model_parallel_world_size(),
        cp=parallel_state.get_context_parallel_world_size(),
        pp=parallel_state.get_pipeline_model_parallel_world_size(),
        ep=parallel_state.get_expert_model_parallel_world_size(),
        etp=parallel_state.get_expert_tensor_parallel_world_size(),
    )


def _stage() -> int:
    return int(parallel_state.get_pipeline_model_parallel_rank())
