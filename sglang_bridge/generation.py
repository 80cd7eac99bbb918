"""One engine reply, decoded and checked."""

from __future__ import annotations

import binascii
import contextlib
import enum
import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import pybase64

from sglang_bridge.errors import RequestFailed
from sglang_bridge.plugin.narrow_routes import TYPES_BY_MARK

# Nats that a log-probability may exceed zero by rounding.
_MAX_ROUNDING = 1e-3
# Nats. Sampled tokens are far more likely. Engines write float32's lowest number for probability 0.
_MIN_LOGPROB = -1e4
_ROUTES_KEY = b'"routed_experts"'
_WIDE_ROUTES = np.dtype("<i4")  # from SGLang without the plugin of the bridge
_OPENING = re.compile(rb'\s*:\s*"')


class FinishReason(enum.StrEnum):
    """Reason why a response ended: a stop token, the maximal length, or an abort by the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class VersionSpan(msgspec.Struct, frozen=True):
    """Output tokens `start` to `end` (exclusive) were sampled with weights of this version."""

    version: str
    start: int
    end: int


@dataclass(frozen=True)
class Generation:
    """A sampled response of r tokens to a prompt of p tokens; n = p + r.

    output_ids: int32 [r]. logprobs: float32 [r], nats, of the temperature-scaled distribution.
    routes: integers [n-1, layers, topk] of the smallest type that holds them, row t for the model's
    input t; None if they were not requested, or if an aborted request has none. Rows that were
    not requested are missing at the beginning. version_spans: oldest first. is_expired: the
    client aborted the request, because the engine was silent.
    """

    output_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    routes: npt.NDArray[np.integer[Any]] | None
    finish_reason: FinishReason
    version_spans: tuple[VersionSpan, ...]
    cached_tokens: int
    retractions: int
    is_expired: bool = False

    @property
    def weight_versions(self) -> tuple[str, ...]:
        """Versions of the weights that sampled the response, oldest first."""
        return tuple(span.version for span in self.version_spans)


class GenerationRejected(ValueError):
    """A reply that cannot be used.

    reason: a short name under which metrics count it. num_tokens: the tokens that the engine
    sampled for it, 0 where the reply does not tell.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.num_tokens = 0


_Count = Annotated[int, msgspec.Meta(ge=0)]


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason | None
    weight_version: str
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    weight_versions: list[VersionSpan] | None = None
    routed_experts: str | None = None
    cached_tokens: _Count = 0
    num_retractions: _Count = 0


class _Reply(msgspec.Struct):
    output_ids: list[int]
    meta_info: _MetaInfo


class _CompletionCount(msgspec.Struct):
    completion_tokens: _Count


class _ReplyWithCount(msgspec.Struct):
    meta_info: _CompletionCount


class _ReplyWithTokens(msgspec.Struct):
    output_ids: list[Any]


_decoder = msgspec.json.Decoder(_Reply)


def decode_generation(
    body: bytes,
    *,
    num_prompt_tokens: int,
    route_shape: tuple[int, int] | None = None,
    vocab_size: int | None = None,
    first_route_row: int = 0,
) -> Generation:
    """Decode the body of a `/generate` reply.

    route_shape: (hidden layers, top-k); None if routes were not requested. vocab_size: the model's;
    None accepts any token id. first_route_row: the first input whose routes were requested.

    Raises `GenerationRejected`, and `RequestFailed` for a reply that is the engine's refusal.
    """
    text, route_base64 = _split_routes(body)
    try:
        # Decoded to str first, because msgspec does not check the bytes of keys that it skips.
        reply = _decoder.decode(text.decode())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        rejection = GenerationRejected("malformed", f"{error}; the reply starts {body[:200]!r}")
        rejection.num_tokens = _count_tokens(text)
        raise rejection from error
    try:
        num_earlier_inputs = num_prompt_tokens - first_route_row
        return _check(reply, route_base64, num_earlier_inputs, route_shape, vocab_size)
    except GenerationRejected as rejection:
        rejection.num_tokens = len(reply.output_ids)
        raise


def _check(
    reply: _Reply,
    route_base64: memoryview,
    num_earlier_inputs: int,
    route_shape: tuple[int, int] | None,
    vocab_size: int | None,
) -> Generation:
    """Check a reply. num_earlier_inputs: those before the first output that must have routes."""
    meta = reply.meta_info
    _raise_refusal(meta.finish_reason)
    finish_reason = _finish_reason(meta)
    output_ids = _tokens(reply.output_ids, vocab_size)
    is_aborted_without_routes = finish_reason is FinishReason.ABORT and meta.routed_experts is None
    routes = None
    if route_shape is not None and not is_aborted_without_routes:
        num_inputs = num_earlier_inputs + len(output_ids) - 1
        routes = _decode_routes(route_base64, meta, num_inputs, route_shape)
    return Generation(
        output_ids=output_ids,
        logprobs=_logprobs(meta, reply.output_ids),
        routes=routes,
        finish_reason=finish_reason,
        version_spans=_version_spans(meta, len(output_ids)),
        cached_tokens=meta.cached_tokens,
        retractions=meta.num_retractions,
    )


def _count_tokens(text: bytes) -> int:
    """Count the sampled tokens of a malformed reply as far as it tells.

    A count beyond the reply's length is impossible: each token takes at least a byte.
    """
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        count = msgspec.json.decode(text, type=_ReplyWithCount).meta_info.completion_tokens
        return count if count <= len(text) else 0
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return len(msgspec.json.decode(text, type=_ReplyWithTokens).output_ids)
    return 0


def _split_routes(body: bytes) -> tuple[bytes, memoryview]:
    """Split a reply into the reply with an empty string for its routes, and the routes' base64.

    Routes may be tens of megabytes. Parsing them as JSON would block every other thread of the
    interpreter.
    """
    key = body.find(_ROUTES_KEY)
    opening = _OPENING.match(body, key + len(_ROUTES_KEY)) if key >= 0 else None
    end = body.find(b'"', opening.end()) if opening is not None else -1
    if opening is None or end < 0:
        return body, memoryview(b"")
    return body[: opening.end()] + body[end:], memoryview(body)[opening.end() : end]


def _tokens(output_ids: list[int], vocab_size: int | None) -> npt.NDArray[np.int32]:
    last = np.iinfo(np.int32).max if vocab_size is None else vocab_size - 1
    if output_ids and not (min(output_ids) >= 0 and max(output_ids) <= last):
        raise GenerationRejected(
            "token_range",
            f"token ids from {min(output_ids)} to {max(output_ids)}: the vocabulary is 0 to {last}",
        )
    return np.asarray(output_ids, np.int32)


def _raise_refusal(reason: _FinishReason | None) -> None:
    """Raise `RequestFailed` if an engine has refused a request whose reply is streamed.

    For a reply that is not streamed, the status of the HTTP reply tells this.
    """
    status = None if reason is None else reason.status_code
    if reason is None or status is None or status < 400:
        return
    message = (reason.message or "")[:500]
    raise RequestFailed(f"the engine has refused the request ({status}): {message}", status=status)


def _finish_reason(meta: _MetaInfo) -> FinishReason:
    name = meta.finish_reason.type if meta.finish_reason is not None else None
    try:
        return FinishReason(str(name))
    except ValueError:
        raise GenerationRejected(
            "finish_reason", f"{name!r} is none of {', '.join(FinishReason)}"
        ) from None


def _logprobs(meta: _MetaInfo, output_ids: list[int]) -> npt.NDArray[np.float32]:
    entries = meta.output_token_logprobs
    if [token for _, token, _ in entries] != output_ids:
        raise GenerationRejected(
            "logprobs_length",
            f"{len(entries)} log-probabilities do not match the {len(output_ids)} output tokens",
        )
    # JSON has no NaN or infinity: the engine writes null.
    with np.errstate(over="ignore"):
        logprobs = np.asarray(
            [np.nan if value is None else value for value, _, _ in entries], np.float32
        )
    if not np.isfinite(logprobs).all():
        raise GenerationRejected("logprobs_nonfinite", "a log-probability is not a finite number")
    if logprobs.max(initial=0) > _MAX_ROUNDING:
        raise GenerationRejected(
            "logprobs_positive", f"a log-probability of {logprobs.max()} is a probability above one"
        )
    if logprobs.min(initial=0) < _MIN_LOGPROB:
        raise GenerationRejected(
            "logprobs_tiny", f"{logprobs.min()} is not a valid log-probability of a sampled token"
        )
    return logprobs


def _decode_routes(
    route_base64: memoryview, meta: _MetaInfo, num_inputs: int, shape: tuple[int, int]
) -> npt.NDArray[np.integer[Any]]:
    """Decode the base64 that `_split_routes` took out of a reply."""
    if meta.routed_experts is None:
        raise GenerationRejected(
            "routes_missing", "start the engine with --enable-return-routed-experts"
        )
    try:
        raw = pybase64.b64decode_as_bytearray(meta.routed_experts or route_base64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise GenerationRejected(
            "routes_encoding", f"routed_experts is not base64: {error}"
        ) from error
    layers, topk = shape
    num_experts = num_inputs * layers * topk
    dtype = _route_type(raw, num_experts)
    if dtype is None:
        raise GenerationRejected(
            "routes_length",
            f"{len(raw)} bytes of routes, expected 4 for each of {num_experts} experts "
            f"({num_inputs} inputs x {layers} layers x top-{topk}), or 1 or 2 and a last byte "
            "that says so, from the plugin narrow_routes of this version",
        )
    routes = np.frombuffer(raw, dtype, num_experts)
    return _narrow(routes.reshape(num_inputs, layers, topk))


def _route_type(raw: bytearray, num_experts: int) -> np.dtype[np.integer[Any]] | None:
    """Return the type of the experts in these bytes, None if there are too few or too many."""
    if len(raw) == num_experts * _WIDE_ROUTES.itemsize:
        return _WIDE_ROUTES
    dtype = TYPES_BY_MARK.get(raw[-1]) if raw else None
    if dtype is None or len(raw) != num_experts * dtype.itemsize + 1:
        return None
    return dtype


def _narrow(routes: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.integer[Any]]:
    """Return routes in the smallest type that holds them: a response may wait for a long time.

    Numbers that are no experts are not changed, so that a later check finds them.
    """
    if routes.dtype.itemsize == 1 or not routes.size or routes.min() < 0:
        return routes
    return routes.astype(np.min_scalar_type(routes.max()))


def _version_spans(meta: _MetaInfo, num_output_tokens: int) -> tuple[VersionSpan, ...]:
    if not meta.weight_versions:
        return (VersionSpan(meta.weight_version, 0, num_output_tokens),)
    spans = tuple(meta.weight_versions)
    ends = [0, *(span.end for span in spans)]
    is_contiguous = [span.start for span in spans] == ends[:-1]
    is_ascending = all(span.start < span.end for span in spans) or num_output_tokens == 0
    if not is_contiguous or not is_ascending or ends[-1] != num_output_tokens:
        raise GenerationRejected(
            "versions", f"spans {spans} do not cover the {num_output_tokens} output tokens in order"
        )
    return spans
