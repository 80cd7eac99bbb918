"""Streams of named tensors from one rank to rank 0 or to all ranks, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence

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
        _send_header(_header_of(bucket), job)
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
        yield from _tensors_of(flat, header)


def share_tensors(
    tensors: Sequence[tuple[str, torch.Tensor]], source: int, job: Job, *, bucket_bytes: int
) -> NamedTensors:
    """Yield tensors of `source` on all ranks, as views into their bucket. A collective, in step.

    tensors: on the source; the others give none. A view is valid until the next bucket.
    bucket_bytes: the size of a bucket; a larger tensor is a bucket of its own.
    """
    if job.rank == source:
        stream = iter(tensors)
        for bucket in iterate_buckets(stream, bucket_bytes=bucket_bytes, device=job.device):
            _share_header(_header_of(bucket), source, job)
            dist.broadcast(bucket.flat, source)
            yield from bucket.tensors()
        _share_header(_BucketHeader([], [], [], 0), source, job)
        return
    while (header := _share_header(None, source, job)).names:
        flat = torch.empty(header.num_bytes, dtype=torch.uint8, device=job.device)
        dist.broadcast(flat, source)
        yield from _tensors_of(flat, header)


def share_number(number: int, source: int, job: Job) -> int:
    """Return the number of `source` on all ranks. A collective."""
    tensor = torch.tensor([number])
    dist.broadcast(tensor, source, group=job.control_group)
    return int(tensor)


def _share_header(header: _BucketHeader | None, source: int, job: Job) -> _BucketHeader:
    """Return the header of `source` on all ranks, which give None. A collective."""
    data = b"" if header is None else msgspec.msgpack.encode(header)
    size = share_number(len(data), source, job)
    buffer = torch.frombuffer(bytearray(data or size), dtype=torch.uint8)
    dist.broadcast(buffer, source, group=job.control_group)
    return msgspec.msgpack.decode(buffer.numpy().tobytes(), type=_BucketHeader)


def _header_of(bucket: Bucket) -> _BucketHeader:
    return _BucketHeader(
        names=bucket.names,
        dtypes=[str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
        shapes=[tuple(shape) for shape in bucket.shapes],
        num_bytes=bucket.flat.numel(),
    )


def _tensors_of(flat: torch.Tensor, header: _BucketHeader) -> NamedTensors:
    dtypes = [getattr(torch, name) for name in header.dtypes]
    shapes = [torch.Size(shape) for shape in header.shapes]
    yield from Bucket(flat, header.names, dtypes, shapes).tensors()
