"""The stream in which an engine answers several requests at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import GenerationRejected

_PREFIX = b"data: "
_END = b"data: [DONE]"
# SGLang appends the index as the last key.
_INDEX = re.compile(rb'"index":\s*(\d{1,9})\s*}\s*$')
_TAIL_BYTES = 64
_UNFINISHED = b'"finish_reason":null'
# A reply with only the first token is smaller.
_MAX_UNFINISHED_BYTES = 8 * 1024

Pieces = list[bytes]


class ReplyStream:
    """Splits the body of a streamed answer into the replies to single requests.

    A reply stays in the pieces in which it came, because it may be tens of megabytes. A thread
    joins them.
    """

    def __init__(self) -> None:
        self._line: Pieces = []

    def feed(self, piece: bytes) -> Iterator[tuple[int, Pieces]]:
        """Yield the finished replies that end in this piece, each with its request's index.

        Raises `GenerationRejected` for what is no reply, and `RequestFailed` for the engine's
        refusal of all the requests.
        """
        first, *others = piece.split(b"\n")  # JSON has no raw newline
        self._line.append(first)
        for part in others:
            line = self._line
            self._line = [part]
            yield from _replies_in(line)


def _replies_in(line: Pieces) -> Iterator[tuple[int, Pieces]]:
    """Yield the reply of a line, if it has one that is finished."""
    pieces = [piece for piece in line if piece]
    while len(pieces) > 1 and len(pieces[0]) < len(_END):
        pieces[:2] = [pieces[0] + pieces[1]]
    if not pieces or pieces == [_END]:
        return
    if not pieces[0].startswith(_PREFIX):
        raise GenerationRejected("malformed", f"the stream has the line {pieces[0][:200]!r}")
    pieces[0] = pieces[0][len(_PREFIX) :]
    match = _INDEX.search(_tail_of(pieces))
    if match is None:
        raise _refusal(b"".join(pieces))
    num_bytes = sum(map(len, pieces))
    if num_bytes <= _MAX_UNFINISHED_BYTES and _UNFINISHED in b"".join(pieces):
        return
    yield int(match[1]), pieces


def _tail_of(pieces: Pieces) -> bytes:
    tail = b""
    for piece in reversed(pieces):
        tail = piece[-_TAIL_BYTES:] + tail
        if len(tail) >= _TAIL_BYTES:
            break
    return tail


class _Error(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Refusal(msgspec.Struct):
    error: _Error


def _refusal(line: bytes) -> Exception:
    """Return the error that an engine has sent in place of the replies."""
    try:
        error = msgspec.json.decode(line, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return GenerationRejected("malformed", f"the stream has the reply {line[:200]!r}")
    words = f"the engine has refused the requests ({error.code}): {error.message[:500]}"
    return RequestFailed(words, status=error.code)
