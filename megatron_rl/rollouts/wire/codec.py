"""Rollouts as bytes, for shared memory and for the exchange between ranks.

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
_PREFIX_BYTES = 8  # magic and header length
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
    header = msgspec.msgpack.encode(_header_of(rollout))
    parts = [_MAGIC + len(header).to_bytes(4, "little") + header]
    parts += [np.ascontiguousarray(s.tokens, np.int32).tobytes() for s in rollout.segments]
    parts += [
        np.ascontiguousarray(s.logprobs, np.float32).tobytes()
        for s in rollout.segments
        if s.logprobs is not None
    ]
    if rollout.routes is not None:
        parts.append(np.ascontiguousarray(rollout.routes).tobytes())
    return b"".join(part + bytes(-len(part) % _ALIGNMENT) for part in parts)


def decode(buffer: bytes | bytearray | memoryview) -> Rollout:
    """Decode one rollout. Its arrays are views of the buffer, read-only if the buffer is.

    Raises `CodecError`.
    """
    view = memoryview(buffer).cast("B")
    header, position = _read_header(view)
    arrays = _ArrayReader(view, position, header.rollout_id)
    tokens = [arrays.read(np.int32, s.num_tokens) for s in header.segments]
    logprobs = [
        arrays.read(np.float32, s.num_tokens) if s.has_logprobs else None for s in header.segments
    ]
    routes = _read_routes(arrays, header)
    segments = [
        Segment(
            tokens=segment_tokens,
            role=s.role,
            trainable=s.trainable,
            logprobs=segment_logprobs,
            route_rows=s.route_rows,
            version=s.version,
        )
        for s, segment_tokens, segment_logprobs in zip(
            header.segments, tokens, logprobs, strict=True
        )
    ]
    return Rollout(
        rollout_id=header.rollout_id,
        prompt_id=header.prompt_id,
        sample_index=header.sample_index,
        finish_reason=header.finish_reason,
        segments=tuple(segments),
        routes=routes,
    )


def select_layers(rollout: Rollout, moe_layers: Sequence[int]) -> Rollout:
    """Keep only the routes of some layers, such as the layers of a pipeline stage.

    moe_layers: places on the MoE-layer axis, in the order of the result.
    """
    if rollout.routes is None or list(moe_layers) == list(range(rollout.routes.shape[1])):
        return rollout
    return replace(rollout, routes=rollout.routes[:, list(moe_layers)])


class _ArrayReader:
    """Reads consecutive aligned arrays of a buffer, beginning at `position`."""

    def __init__(self, view: memoryview, position: int, rollout_id: str) -> None:
        self._view = view
        self._position = position
        self._rollout_id = rollout_id

    def read(self, dtype: type[np.generic], count: int) -> np.ndarray:
        """Return the next `count` elements. Raises `CodecError` if the buffer is too short."""
        nbytes = np.dtype(dtype).itemsize * count
        if self._position + nbytes > len(self._view):
            raise CodecError(
                f"rollout {self._rollout_id}: {len(self._view)} bytes end inside an array"
            )
        array = np.frombuffer(self._view, dtype, count, self._position)
        self._position += nbytes + -nbytes % _ALIGNMENT
        return array


def _header_of(rollout: Rollout) -> _Header:
    routes = rollout.routes
    segments = [
        _SegmentHeader(
            num_tokens=len(s.tokens),
            role=s.role,
            trainable=s.trainable,
            has_logprobs=s.logprobs is not None,
            route_rows=s.route_rows,
            version=s.version,
        )
        for s in rollout.segments
    ]
    return _Header(
        rollout_id=rollout.rollout_id,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        finish_reason=rollout.finish_reason,
        segments=segments,
        routes_shape=None
        if routes is None
        else (routes.shape[0], routes.shape[1], routes.shape[2]),
        routes_dtype="" if routes is None else routes.dtype.name,
    )


def _read_header(view: memoryview) -> tuple[_Header, int]:
    """Return the header and the position of the first array."""
    if len(view) < _PREFIX_BYTES or bytes(view[:4]) != _MAGIC:
        raise CodecError(f"{len(view)} bytes do not start with an encoded rollout")
    end = _PREFIX_BYTES + int.from_bytes(view[4:_PREFIX_BYTES], "little")
    if end > len(view):
        raise CodecError(f"the header claims {end} bytes, the buffer has {len(view)}")
    try:
        header = _header_decoder.decode(view[_PREFIX_BYTES:end])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise CodecError(f"unreadable rollout header: {error}") from error
    return header, end + -end % _ALIGNMENT


def _read_routes(arrays: _ArrayReader, header: _Header) -> np.ndarray | None:
    if header.routes_shape is None:
        return None
    dtype = _ROUTE_DTYPES.get(header.routes_dtype)
    if dtype is None:
        raise CodecError(f"rollout {header.rollout_id}: routes of dtype {header.routes_dtype!r}")
    num_rows, num_layers, topk = header.routes_shape
    return arrays.read(dtype, num_rows * num_layers * topk).reshape(num_rows, num_layers, topk)
