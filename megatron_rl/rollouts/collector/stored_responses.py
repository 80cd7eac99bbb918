"""The responses of a rollout, as engines sent them, for an environment that plays it again."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.contracts.routes import RouteShape, expand_routes
from sglang_bridge.generation import Generation, VersionSpan


@dataclass(frozen=True)
class StoredResponse:
    """A response, or the sampled part of the last one.

    input_ids: everything before it. generation: finish reason ABORT if more of it is to follow.
    is_repetitive: it was cut off, because it repeated itself.
    """

    input_ids: list[int]
    generation: Generation
    is_repetitive: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.generation.output_ids)


def responses_of(
    rollout: Rollout, shape: RouteShape | None, *, is_repetitive: bool = False
) -> list[StoredResponse]:
    """Return the sampled responses of a rollout, in order.

    Text that was not sampled separates them: two responses without text between them are one.

    shape: of the engines' routes. None: they send none. is_repetitive: the last one was cut off,
    because it repeated itself.
    """
    responses: list[StoredResponse] = []
    earlier_tokens: list[int] = []
    segments: list[Segment] = []

    def end_response(finish_reason: FinishReason) -> None:
        if segments:
            response = _response(earlier_tokens, segments, finish_reason, rollout, shape)
            responses.append(response)
            earlier_tokens.extend(response.generation.output_ids.tolist())
            segments.clear()

    for segment in rollout.segments:
        if segment.role is Role.RESPONSE and segment.logprobs is not None:
            segments.append(segment)
            continue
        end_response(FinishReason.STOP)
        earlier_tokens.extend(segment.tokens.tolist())
    end_response(rollout.finish_reason)
    if is_repetitive and responses:
        responses[-1] = replace(responses[-1], is_repetitive=True)
    return responses


def _response(
    earlier_tokens: list[int],
    segments: list[Segment],
    finish_reason: FinishReason,
    rollout: Rollout,
    shape: RouteShape | None,
) -> StoredResponse:
    """Make a response of its segments, which have log-probabilities."""
    logprobs = [segment.logprobs for segment in segments if segment.logprobs is not None]
    spans: list[VersionSpan] = []
    start = 0
    for segment in segments:
        end = start + len(segment.tokens)
        spans.append(VersionSpan(str(segment.version), start, end))
        start = end
    routes = None
    if shape is not None and rollout.routes is not None:
        routes = expand_routes(rollout.routes[: len(earlier_tokens) + start - 1], shape)
    generation = Generation(
        output_ids=np.concatenate([segment.tokens for segment in segments]),
        logprobs=np.concatenate(logprobs),
        routes=routes,
        finish_reason=finish_reason,
        version_spans=tuple(spans),
        cached_tokens=0,
        retractions=0,
    )
    return StoredResponse(list(earlier_tokens), generation)
