"""Sends the weights of every pipeline stage to rank 0, which belongs to the first stage."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_rl.mcore.job import Job
from sglang_bridge.weights.buckets import Bucket, NamedTensors, iterate_buckets


class _BucketHeader(msgspec.Struct):
    """The contents of a bucket, sent before its bytes.

    names, dtypes, shapes: of its tensors in order; dtypes by torch's names, such as "bfloat16".
    num_bytes: the size of the bucket.
    last: True for the last bucket of its pipeline stage.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    num_bytes: int
    last: bool


def iterate_all_stages(
    weights: NamedTensors, job: Job, *, bucket_bytes: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of all pipeline stages on rank 0, in the order of the stages.

    Collective: all ranks must exhaust it. The other ranks yield nothing, or the tensors of their
    own stage.

    The ranks of rank 0's pipeline send their weights to it over the pipeline's group, bucket by
    bucket. Both sides hold one bucket at a time. All other ranks have copies of these weights, and
    only take part in the collectives inside `weights`.

    weights: the tensors of this rank's stage, as `iterate_hf_weights` yields them.
    bucket_bytes: the size of a bucket; a larger tensor is a bucket of its own.
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
            yield from _receive(source, job, pipeline)


def _send(bucket: Bucket, job: Job, pipeline: dist.ProcessGroup) -> None:
    header = _BucketHeader(
        names=bucket.names,
        dtypes=[str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        shapes=[tuple(shape) for shape in bucket.shapes],
        num_bytes=bucket.flat.numel(),
        last=bucket.last,
    )
    data = msgspec.msgpack.encode(header)
    dist.send(torch.tensor([len(data)]), 0, group=job.control_group)
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0, group=job.control_group)
    dist.send(bucket.flat, 0, group=pipeline)


def _receive(
    source: int, job: Job, pipeline: dist.ProcessGroup
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of one other stage. Each is a view into its bucket."""
    is_last = False
    while not is_last:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=job.control_group)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, source, group=job.control_group)
        header = msgspec.msgpack.decode(data.numpy().tobytes(), type=_BucketHeader)
        flat = torch.empty(header.num_bytes, dtype=torch.uint8, device=job.device)
        dist.recv(flat, source, group=pipeline)
        dtypes = [getattr(torch, name) for name in header.dtypes]
        shapes = [torch.Size(shape) for shape in header.shapes]
        yield from Bucket(flat, header.last, header.names, dtypes, shapes).tensors()
        is_last = header.last
