"""Rollouts as bytes, for shared memory, the exchange between ranks and files.

Layout: 4-byte magic, 4-byte header length, a MessagePack header, then tokens, log-probabilities and
routes, each starting at a multiple of 8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment

_MAGIC = b"RLO1"
_ALIGNMENT = 8
_ROUTE_DTYPES: dict[str, type[np.unsignedinteger]] = {"uint8": np.uint8, "uint16": np.uint16}


class CodecError(ValueError):
    """A buffer does not hold an encoded rollout."""


class _SegmentHeader(msgspec.Struct, array_like=True):
    num_tokens: int
    role: Role
    trainable: bool
    has_logprobs: bool
    route_rows: tuple[int, int]
    version: int


class _Header(msgspec.Struct, array_like=True):
    rollout_id: str
    prompt_id: str
    sample_index: int
    finish_reason: FinishReason
    segments: list[_SegmentHeader]
    routes_shape: tuple[int, int, int] | None
    routes_dtype: str


_header_decoder = msgspec.msgpack.Decoder(_Header)


def encode(rollout: Rollout) -> bytes:
    """Encode one rollout."""
    routes = rollout.routes
    header = _Header(
        rollout_id=rollout.rollout_id,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        finish_reason=rollout.finish_reason,
        segments=[
            _SegmentHeader(
                len(s.tokens), s.role, s.trainable, s.logprobs is not None, s.route_rows, s.version
            )
            for s in rollout.segments
        ],
        routes_shape=None
        if routes is None
        else (routes.shape[0], routes.shape[1], routes.shape[2]),
        routes_dtype="" if routes is None else routes.dtype.name,
    )
    packed = msgspec.msgpack.encode(header)
    parts = [_MAGIC + len(packed).to_bytes(4, "little") + packed]
    parts += [np.ascontiguousarray(s.tokens, np.int32).tobytes() for s in rollout.segments]
    parts += [
        np.ascontiguousarray(s.logprobs, np.float32).tobytes()
        for s in rollout.segments
        if s.logprobs is not None
    ]
    if routes is not None:
        parts.append(np.ascontiguousarray(routes).tobytes())
    return b"".join(part + bytes(-len(part) % _ALIGNMENT) for part in parts)


def decode(buffer: bytes | bytearray | memoryview) -> Rollout:
    """Decode one rollout; its arrays are read-only views when the buffer is."""
    view = memoryview(buffer).cast("B")
    header, position = _read_header(view)

    def take(dtype: type[np.generic], count: int) -> np.ndarray:
        nonlocal position
        nbytes = np.dtype(dtype).itemsize * count
        if position + nbytes > len(view):
            raise CodecError(f"rollout {header.rollout_id}: {len(view)} bytes end inside an array")
        array = np.frombuffer(view, dtype, count, position)
        position += nbytes + -nbytes % _ALIGNMENT
        return array

    tokens = [take(np.int32, s.num_tokens) for s in header.segments]
    logprobs = [take(np.float32, s.num_tokens) if s.has_logprobs else None for s in header.segments]
    routes = None
    if header.routes_shape is not None:
        if header.routes_dtype not in _ROUTE_DTYPES:
            raise CodecError(
                f"rollout {header.rollout_id}: routes of dtype {header.routes_dtype!r}"
            )
        rows, layers, topk = header.routes_shape
        routes = take(_ROUTE_DTYPES[header.routes_dtype], rows * layers * topk).reshape(
            rows, layers, topk
        )
    segments = tuple(
        Segment(t, s.role, s.trainable, p, s.route_rows, s.version)
        for s, t, p in zip(header.segments, tokens, logprobs, strict=True)
    )
    return Rollout(
        header.rollout_id,
        header.prompt_id,
        header.sample_index,
        header.finish_reason,
        segments,
        routes,
    )


def select_layers(rollout: Rollout, moe_layers: Sequence[int]) -> Rollout:
    """Keep the routes of the given rows of the MoE-layer axis, in that order: what a pipeline stage
    needs.
    """
    if rollout.routes is None or list(moe_layers) == list(range(rollout.routes.shape[1])):
        return rollout
    return replace(rollout, routes=rollout.routes[:, list(moe_layers)])


def _read_header(view: memoryview) -> tuple[_Header, int]:
    if len(view) < 8 or bytes(view[:4]) != _MAGIC:
        raise CodecError(f"{len(view)} bytes do not start with an encoded rollout")
    length = 8 + int.from_bytes(view[4:8], "little")
    if length > len(view):
        raise CodecError(f"the header claims {length} bytes, the buffer has {len(view)}")
    try:
        header = _header_decoder.decode(view[8:length])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CodecError(f"unreadable rollout header: {error}") from error
    return header, length + -length % _ALIGNMENT
