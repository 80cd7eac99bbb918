"""A simulated engine: continuous batching with the time of each forward pass."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, deque
from dataclasses import dataclass, field

from megatron_rl.rollouts.wire.messages import Priority

_ROUNDING = 1e-6  # of a pass

# SGLang's scheduler reserves this share of the tokens that a running response may still get. The
# share decays from the first value to the last one in so many decode passes.
_FIRST_SHARE = 0.7
_LAST_SHARE = 0.7 * 0.14
_SHARE_PASSES = 600
# It reserves for no more tokens of a response, and after a retraction for so many passes
_MOST_RESERVED = 4096
_PASSES_AFTER_RETRACTION = 20


@dataclass(frozen=True)
class EngineSpeed:
    """The seconds of a forward pass.

    A decode pass gives each running response one token. It takes `step`, `request` for each of
    them, and `kv_token` for each token of their contexts. A pass that reads prompts takes `step`,
    and `prompt_token` for each of their tokens. It gives each of these responses its first token,
    and no other response goes on meanwhile.

    dispatch: from the request until the engine has it. arrival: between two requests that reach the
    engines of a node.
    """

    step: float = 0.0
    request: float = 0.0
    kv_token: float = 0.0
    prompt_token: float = 0.0
    dispatch: float = 0.0
    arrival: float = 0.0

    def decode_seconds(self, passes: int, running: int, context: int) -> float:
        """Return the seconds of consecutive passes. context: tokens of all contexts at first."""
        growth = running * passes * (passes - 1) / 2
        seconds = passes * (self.step + self.request * running + self.kv_token * context)
        return seconds + self.kv_token * growth

    def read_seconds(self, tokens: int) -> float:
        """Return the seconds of a pass that reads prompts. tokens: of all of them."""
        return self.step + self.prompt_token * tokens


@dataclass(eq=False)
class Response:
    """A response of a simulated run.

    key: step, prompt and sample. length: tokens at its end. expectation: tokens that the run
    expects, 0 if it does not know. limit: tokens at which the engine would cut it off, None if it
    knows the length. num_tokens: those so far. by_version: the same, by the version of the weights.
    end: seconds since the start of the run, NaN before it.
    """

    key: tuple[int, int, int]
    prompt_tokens: int
    length: int
    expectation: int = 0
    limit: int | None = None
    num_tokens: int = 0
    by_version: Counter[int] = field(default_factory=Counter)
    end: float = math.nan

    def add(self, version: int, tokens: int) -> None:
        """Add tokens that a version has sampled."""
        self.num_tokens += tokens
        self.by_version[version] += tokens

    @property
    def priority(self) -> Priority:
        """Its place among the responses that wait, as in `GroupRequest.priority`."""
        return (self.key[0], -max(0, self.expectation - self.num_tokens))

    @property
    def is_complete(self) -> bool:
        """True once it has all its tokens."""
        return self.num_tokens >= self.length


@dataclass(eq=False)
class Piece:
    """A request for at most `tokens` further tokens of a response.

    context: tokens that the engine reads first: the prompt and the tokens so far. num_sampled:
    those that it got, once it has ended, was stopped or retracted.
    """

    response: Response
    tokens: int
    context: int = field(init=False)
    num_sampled: int = 0
    end_pass: int = 0  # the pass of the engine that gives its last token

    def __post_init__(self) -> None:
        self.context = self.response.prompt_tokens + self.response.num_tokens

    @property
    def most_tokens(self) -> int:
        """The tokens that it may still get, as far as the engine knows."""
        limit = self.response.limit
        num_sampled = self.num_sampled
        return (self.tokens if limit is None else limit - self.response.num_tokens) - num_sampled


class SimulatedEngine:
    """An engine that runs requests in the order in which it got them.

    `now` and all times are in seconds of an engine that nothing slows down.

    max_running: responses that run at a time. kv_tokens: of contexts that its cache holds. end: of
    the present passes, infinite without one. passes: decode passes so far. num_sampled, num_read:
    tokens so far. num_retractions: of responses so far. busy_seconds: of all passes so far.

    A request joins if the cache has room for its context, for the tokens that it may get, and for a
    share of those that running responses may still get. If a pass finds the cache full, the
    responses with the fewest tokens are retracted: they wait behind all others, and the engine
    reads them again. Both are as in SGLang's scheduler, with pages of one token.
    """

    def __init__(self, speed: EngineSpeed, max_running: int, kv_tokens: float = math.inf) -> None:
        self._speed = speed
        self._max_running = max_running
        self._kv_tokens = kv_tokens
        self._share = _FIRST_SHARE  # of the tokens that running responses may still get
        self._is_full = False  # until a response ends or is retracted
        self._queue: deque[Piece] = deque()
        self._running: list[tuple[int, int, Piece]] = []  # a heap, by the end of the piece
        self._order = itertools.count()
        self._context = 0  # tokens of the contexts of what is running
        self._begin = 0.0  # of the present passes
        self._reading: list[Piece] = []  # empty in decode passes
        self._decode_passes = 0  # in the present passes
        self._is_stopping = False
        self.end = math.inf
        self.in_flight = 0
        self.passes = 0
        self.num_sampled = 0
        self.num_read = 0
        self.num_retractions = 0
        self.busy_seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """True during a forward pass."""
        return self.end < math.inf

    def add(self, piece: Piece) -> None:
        """Take a request. Raises ValueError for a response that the cache cannot hold."""
        tokens = piece.context + piece.most_tokens
        if tokens + 1 >= self._kv_tokens:
            raise ValueError(
                f"kv_tokens={self._kv_tokens}: a prompt and its response have up to {tokens} "
                f"tokens, and need at least {tokens + 2}"
            )
        self._queue.append(piece)
        self.in_flight += 1

    def start(self, now: float) -> None:
        """Begin the next passes, if there are any.

        Decode passes that are under way end with the present one if a request can join.
        """
        if self.is_busy:
            if self._can_join() and self._decode_passes > 1:
                self._end_early(now)
            return
        if self._is_stopping:
            return
        self._begin = now
        pieces = self._admit() if self._can_join() else []
        if pieces:
            self._begin_reading(pieces)
        elif self._running:
            self._retract()
            self._begin_decoding(self._next_passes())

    def stop(self, now: float) -> None:
        """Begin no further pass until `proceed`."""
        self._is_stopping = True
        if self._decode_passes > 1:
            self._end_early(now)

    def proceed(self) -> None:
        """Begin passes again."""
        self._is_stopping = False

    def withdraw(self) -> list[Piece]:
        """Give all requests back, with the tokens that they have. The engine must not be busy."""
        if self.is_busy:
            raise RuntimeError("requests were withdrawn in the middle of a forward pass")
        pieces = [piece for _, _, piece in sorted(self._running, key=lambda item: item[1])]
        for piece in pieces:
            self._note_sampled(piece)
        pieces += self._queue
        self._running.clear()
        self._queue.clear()
        self._context = 0
        self._is_full = False
        self.in_flight = 0
        return pieces

    def finish(self) -> list[Piece]:
        """End the passes, whose time is over. Returns the pieces that ended with them."""
        self.busy_seconds += self.end - self._begin
        self.end = math.inf
        pieces = self._finish_reading() if self._reading else self._finish_decoding()
        for piece in pieces:
            piece.num_sampled = piece.tokens
            self._context -= piece.context + piece.tokens
        self.in_flight -= len(pieces)
        if pieces:
            self._is_full = False
        if not self._running and not self._queue:
            self._share = _FIRST_SHARE
        return pieces

    def _can_join(self) -> bool:
        """Return True if a request may join, as far as the cache has room."""
        return bool(self._queue) and len(self._running) < self._max_running and not self._is_full

    def _admit(self) -> list[Piece]:
        """Take the requests that join from the queue."""
        room = self._room()
        pieces: list[Piece] = []
        while self._queue and len(self._running) + len(pieces) < self._max_running:
            piece = self._queue[0]
            tokens = piece.context + piece.num_sampled + min(piece.most_tokens, _MOST_RESERVED) + 1
            if tokens >= room:
                self._is_full = True
                break
            room -= tokens
            pieces.append(self._queue.popleft())
        return pieces

    def _room(self) -> float:
        """Return the tokens of the cache that are neither used nor reserved."""
        if self._kv_tokens == math.inf:
            return math.inf
        in_use = self._context - len(self._running)  # the last token of each is not in the cache
        reserve = 0.0
        for _, _, piece in self._running:
            self._note_sampled(piece)
            share = 1.0 if piece.response.limit is None else self._share
            reserve += share * min(piece.most_tokens, _MOST_RESERVED)
        return self._kv_tokens - in_use - reserve

    def _retract(self) -> None:
        """Take responses back until a decode pass fits."""
        if self._context <= self._kv_tokens:
            return
        pieces = [piece for _, _, piece in self._running]
        for piece in pieces:
            self._note_sampled(piece)
        pieces.sort(key=_tokens_and_prompt, reverse=True)
        while len(pieces) > 1 and self._context > self._kv_tokens:
            piece = pieces.pop()
            self._context -= piece.context + piece.num_sampled
            self._queue.append(piece)
            self.num_retractions += 1
        self._running = [item for item in self._running if item[-1] in pieces]
        heapq.heapify(self._running)
        num_tokens = sum(piece.response.num_tokens + piece.num_sampled for piece in pieces)
        most = sum(p.response.num_tokens + p.num_sampled + p.most_tokens for p in pieces)
        self._share = min(1.0, (num_tokens + _PASSES_AFTER_RETRACTION * len(pieces)) / (most + 1))
        self._is_full = False

    def _next_passes(self) -> int:
        """Return how many decode passes follow before something else can happen."""
        passes = self._running[0][0] - self.passes
        if self._kv_tokens < math.inf:
            fitting = (self._kv_tokens - self._context) // len(self._running) + 1
            passes = min(passes, int(fitting))
        return 1 if self._can_join() else passes

    def _note_sampled(self, piece: Piece) -> None:
        piece.num_sampled = piece.tokens - (piece.end_pass - self.passes)

    def _begin_reading(self, pieces: list[Piece]) -> None:
        self._reading = pieces
        tokens = sum(piece.context + piece.num_sampled for piece in pieces)
        self.end = self._begin + self._speed.read_seconds(tokens)

    def _finish_reading(self) -> list[Piece]:
        ends = []
        for piece in self._reading:
            self.num_read += piece.context + piece.num_sampled
            self.num_sampled += 1
            self._context += piece.context + piece.num_sampled + 1
            remaining_passes = piece.tokens - piece.num_sampled - 1
            piece.end_pass = self.passes + remaining_passes
            if not remaining_passes:
                ends.append(piece)
            else:
                heapq.heappush(self._running, (piece.end_pass, next(self._order), piece))
        self._reading = []
        return ends

    def _begin_decoding(self, passes: int) -> None:
        seconds = self._speed.decode_seconds(passes, len(self._running), self._context)
        self._decode_passes = passes
        self.end = self._begin + seconds

    def _finish_decoding(self) -> list[Piece]:
        self.passes += self._decode_passes
        decay = self._decode_passes * (_FIRST_SHARE - _LAST_SHARE) / _SHARE_PASSES
        self._share = max(_LAST_SHARE, self._share - decay)
        new_tokens = self._decode_passes * len(self._running)
        self.num_sampled += new_tokens
        self._context += new_tokens
        self._decode_passes = 0
        ends = []
        while self._running and self._running[0][0] <= self.passes:
            ends.append(heapq.heappop(self._running)[2])
        return ends

    def _end_early(self, now: float) -> None:
        """Let the present decode pass be the last one."""
        self._begin_decoding(self._passes_within(now - self._begin))

    def _passes_within(self, seconds: float) -> int:
        """Return the number of decode passes that have begun: at least one."""
        running = len(self._running)
        first = self._speed.decode_seconds(1, running, self._context)
        half_growth = self._speed.kv_token * running / 2
        if first <= 0:
            return self._decode_passes
        # n passes take n * first + half_growth * (n * n - n)
        linear = first - half_growth
        if half_growth > 0:
            root = math.sqrt(linear * linear + 4 * half_growth * seconds)
            passes = (root - linear) / (2 * half_growth)
        else:
            passes = seconds / linear
        return max(1, min(self._decode_passes, math.ceil(passes - _ROUNDING)))


def _tokens_and_prompt(piece: Piece) -> tuple[int, int]:
    """Return by what a response is kept when the cache is full: the largest first."""
    response = piece.response
    return (response.num_tokens + piece.num_sampled, -response.prompt_tokens)
