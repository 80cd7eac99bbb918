"""A response that may come in pieces, because an engine was asked to stop in the middle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from megatron_rl.contracts.prompt import Sampling
from sglang_bridge.generation import FinishReason, Generation, VersionSpan


@dataclass(eq=False)
class PartialResponse:
    """The pieces of a response so far, and the request for the rest of it.

    The rest is requested with the same seed. An engine's random numbers follow seed and position,
    so the joined response equals one without interruption, if the weights are the same. Each piece
    keeps the routes that its own request read, because they decided its tokens.

    num_known_routes: the first inputs of the prompt whose routes are known, and not requested.
    """

    prompt: Sequence[int]
    sampling: Sampling
    pieces: list[Generation] = field(default_factory=list)
    num_known_routes: int = 0

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far."""
        return sum(len(piece.output_ids) for piece in self.pieces)

    @property
    def input_ids(self) -> list[int]:
        """The prompt and the tokens so far."""
        return [*self.prompt, *self.output_ids]

    @property
    def output_ids(self) -> list[int]:
        """The tokens so far."""
        return [token for piece in self.pieces for token in piece.output_ids.tolist()]

    @property
    def num_remaining(self) -> int:
        """The largest number of tokens that may follow."""
        return self.sampling.max_new_tokens - self.num_tokens

    def next_sampling(self, limit: int | None = None) -> Sampling:
        """Return the parameters for the rest of the response, or for at most `limit` tokens."""
        num_tokens = self.num_remaining if limit is None else min(limit, self.num_remaining)
        return msgspec.structs.replace(self.sampling, max_new_tokens=num_tokens)

    @property
    def first_route_row(self) -> int:
        """The first row of routes that the rest has to have: earlier inputs have theirs."""
        if not self.pieces:
            return self.num_known_routes
        return len(self.prompt) + self.num_tokens - 1

    def add(self, piece: Generation) -> None:
        """Add a piece. One without tokens changes nothing."""
        if len(piece.output_ids):
            self.pieces.append(piece)

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to sample.

        An engine that stops a request does not look whether its last token ends the response.
        """
        if not self.pieces:
            return False
        return self._finish_reason is not FinishReason.ABORT

    def generation(self) -> Generation:
        """Return the joined response."""
        if len(self.pieces) == 1:
            return replace(self.pieces[0], finish_reason=self._finish_reason)
        last = self.pieces[-1]
        routes = None
        if last.routes is not None:
            rows = [piece.routes for piece in self.pieces if piece.routes is not None]
            routes = np.concatenate(rows)
        return Generation(
            output_ids=np.concatenate([piece.output_ids for piece in self.pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in self.pieces]),
            routes=routes,
            finish_reason=self._finish_reason,
            version_spans=self._version_spans(),
            cached_tokens=self.pieces[0].cached_tokens,
            # One within a single version overwrites no rows that another version has recorded
            retractions=sum(p.retractions for p in self.pieces if len(p.version_spans) > 1),
        )

    @property
    def _finish_reason(self) -> FinishReason:
        last = self.pieces[-1]
        if last.finish_reason is not FinishReason.ABORT:
            return last.finish_reason
        if int(last.output_ids[-1]) in self.sampling.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return FinishReason.ABORT

    def _version_spans(self) -> tuple[VersionSpan, ...]:
        """Return the spans of all pieces. Neighbors of the same version are one."""
        spans: list[VersionSpan] = []
        start = 0
        for piece in self.pieces:
            for span in piece.version_spans:
                first = span.start + start
                if spans and spans[-1].version == span.version:
                    first = spans.pop().start
                spans.append(VersionSpan(span.version, first, span.end + start))
            start += len(piece.output_ids)
        return tuple(spans)
