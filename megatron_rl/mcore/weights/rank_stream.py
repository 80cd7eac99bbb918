"""A stream of named tensors from one rank to rank 0, bucket by bucket."""

from __future__ import annotations

import msgspec
import torch
import torch.distributed as dist

from megatron_rl.mcore.job import Job
from sglang_bridge.weights.buckets import Bucket, NamedTensors, iterate_buckets


class _BucketHeader(msgspec.Struct):
    """The contents of a bucket, sent before its bytes.

    names, dtypes, shapes: of its tensors in order; dtypes by torch's names, such as "bfloat16".
    num_bytes: the size of the bucket. A bucket without tensors ends the stream.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    num_bytes: int


def send_tensors(tensors: NamedTensors, job: Job, *, bucket_bytes: int) -> None:
    """Send named tensors to rank 0, which calls `receive_tensors`.

    bucket_bytes: the size of a bucket; a larger tensor is a bucket of its own. Both sides hold one.
    """
    for bucket in iterate_buckets(tensors, bucket_bytes=bucket_bytes, device=job.device):
        header = _BucketHeader(
            names=bucket.names,
            dtypes=[str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            shapes=[tuple(shape) for shape in bucket.shapes],
            num_bytes=bucket.flat.numel(),
        )
        _send_header(header, job)
        dist.send(bucket.flat, 0)
    _send_header(_BucketHeader([], [], [], 0), job)


def _send_header(header: _BucketHeader, job: Job) -> None:
    data = msgspec.msgpack.encode(header)
    dist.send(torch.tensor([len(data)]), 0, group=job.control_group)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    dist.send(buffer, 0, group=job.control_group)


def _receive_header(source: int, job: Job) -> _BucketHeader:
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, group=job.control_group)
    data = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(data, source, group=job.control_group)
    return msgspec.msgpack.decode(data.numpy().tobytes(), type=_BucketHeader)


def receive_tensors(source: int, job: Job) -> NamedTensors:
    """Yield the named tensors that another rank sends to rank 0. Each is a view into its bucket."""
    while (header := _receive_header(source, job)).names:
        flat = torch.empty(header.num_bytes, dtype=torch.uint8, device=job.device)
        dist.recv(flat, source)
        dtypes = [getattr(torch, name) for name in header.dtypes]
        shapes = [torch.Size(shape) for shape in header.shapes]
        yield from Bucket(flat, header.names, dtypes, shapes).tensors()
