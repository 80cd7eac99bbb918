"""The weights of every pipeline stage where they are sent from: rank 0, which belongs to the first
stage.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.mcore.job import Job
from sglang_bridge.weights.buckets import Bucket, NamedTensors, iterate_buckets


class _Label(msgspec.Struct):
    """What is in a bucket. dtypes: their names in torch."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    num_bytes: int
    last: bool


def every_stage(
    weights: NamedTensors, job: Job, *, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Rank 0 yields `weights`, its own stage's, and then every other stage's in their order; all
    ranks must exhaust it.

    The ranks of rank 0's pipeline send theirs to it, bucket by bucket over that pipeline's group:
    peak memory is one bucket on both sides. All other ranks hold copies, and take part in the
    gathering inside `weights` alone.
    """
    pipeline = parallel_state.get_pipeline_model_parallel_group()
    ranks = dist.get_process_group_ranks(pipeline)
    if job.rank == ranks[0] or ranks[0] != 0:
        yield from weights
    else:
        for bucket in iterate_buckets(weights, bucket_bytes=bucket_bytes, device=job.device):
            _send(bucket, job, pipeline)
    if job.rank == 0:
        for source in ranks[1:]:
            yield from _received(source, job, pipeline)


def _send(bucket: Bucket, job: Job, pipeline: dist.ProcessGroup) -> None:
    dtypes = [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes]
    shapes = [tuple(shape) for shape in bucket.shapes]
    data = msgspec.msgpack.encode(
        _Label(bucket.names, dtypes, shapes, bucket.flat.numel(), bucket.last)
    )
    dist.send(torch.tensor([len(data)]), 0, group=job.control_group)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=job.control_group)
    dist.send(bucket.flat, 0, group=pipeline)


def _received(
    source: int, job: Job, pipeline: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one other stage; each is a view that lives as long as its bucket."""
    last = False
    while not last:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=job.control_group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, source, group=job.control_group)
        label = msgspec.msgpack.decode(data.numpy().tobytes(), type=_Label)
        flat = torch.empty(label.num_bytes, dtype=torch.uint8, device=job.device)
        dist.recv(flat, source, group=pipeline)
        dtypes = [getattr(torch, name) for name in label.dtypes]
        yield from Bucket(
            flat, label.last, label.names, dtypes, [torch.Size(s) for s in label.shapes]
        ).tensors()
        last = label.last
