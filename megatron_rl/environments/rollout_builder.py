"""A rollout in the making: who wrote its tokens, with which weights, and the routes of when each
was first read.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.contracts.routes import Routes, RouteShape, validate_routes
from sglang_bridge.generation import Generation

_MOST_DIGITS = 9  # of a weight version


class RolloutRejected(ValueError):
    """What came back cannot become a rollout; `reason` is a short name that metrics count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RolloutBuilder:
    """A prompt and what follows it. route_shape None: routes are not kept.

    Tokens that nobody sampled wait as unread until a generation has read them, and get the version
    of its weights.
    """

    def __init__(
        self, rollout_id: str, prompt: Prompt, sample_index: int, route_shape: RouteShape | None
    ) -> None:
        self._rollout_id = rollout_id
        self._prompt = prompt
        self._sample_index = sample_index
        self._route_shape = route_shape
        self._routes: Routes | None = None
        self._segments: list[
            Segment
        ] = []  # their route_rows are token positions until `rollout` clips them
        self._unread = [(Role.PROMPT, list(prompt.token_ids))]

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, unread ones included."""
        read = [token for segment in self._segments for token in segment.tokens.tolist()]
        return read + [token for _, tokens in self._unread for token in tokens]

    def observe(self, tokens: list[int]) -> None:
        self._unread.append((Role.TOOL, tokens))

    def demonstrate(self, tokens: list[int]) -> None:
        self._read(version=0)
        self._add(Role.RESPONSE, tokens, None, version=0)

    def sample(self, generation: Generation) -> None:
        """Add what a generation read and drew after all tokens so far.

        Raises `RolloutRejected` and `RouteError`.
        """
        if not len(generation.output_ids):
            raise self._rejected("empty", "the engine returned no token")
        if generation.finish_reason is FinishReason.ABORT:
            raise self._rejected("aborted", "the engine aborted it")
        versions = [self._number(span.version) for span in generation.version_spans]
        if versions != sorted(versions):
            raise self._rejected("versions", f"weight versions {versions} go back")
        if self._route_shape is not None and generation.retractions and versions[0] != versions[-1]:
            # read again with the last weights, and the rows of what older ones had drawn are
            # overwritten
            raise self._rejected(
                "routes_rewritten", f"retracted while its weights changed, versions {versions}"
            )
        self._append_routes(generation)
        # a retracted request is re-prefilled, so what it read was last read with the last version
        # it was drawn with
        self._read(version=versions[-1] if generation.retractions else versions[0])
        for span, version in zip(generation.version_spans, versions, strict=True):
            drawn = slice(span.start, span.end)
            self._add(
                Role.RESPONSE, generation.output_ids[drawn], generation.logprobs[drawn], version
            )

    def rollout(self, finish_reason: FinishReason, *, trainable: bool) -> Rollout:
        """All up to the last response.

        trainable: whether its responses receive a loss. Raises `RolloutRejected`.
        """
        if not self._segments:
            raise self._rejected("empty", "there is no response in it")
        num_inputs = self._segments[-1].route_rows[1] - 1
        if self._route_shape is not None and (
            self._routes is None or len(self._routes) != num_inputs
        ):
            raise self._rejected(
                "routes_missing",
                "nobody sampled its last response; set train.replay=trainer or off",
            )
        segments = tuple(
            replace(
                segment,
                trainable=trainable and segment.role is Role.RESPONSE,
                route_rows=(segment.route_rows[0], min(segment.route_rows[1], num_inputs)),
            )
            for segment in self._segments
        )
        return Rollout(
            self._rollout_id,
            self._prompt.id,
            self._sample_index,
            finish_reason,
            segments,
            self._routes,
        )

    def _append_routes(self, generation: Generation) -> None:
        """Keep the rows recorded when a token was first read: of a later generation only those
        beyond them are new.
        """
        if self._route_shape is None:
            return
        if generation.routes is None:
            raise self._rejected("routes_missing", "the engine recorded no routes")
        num_inputs = len(self.tokens) + len(generation.output_ids) - 1
        known = 0 if self._routes is None else len(self._routes)
        rows = validate_routes(generation.routes[known:], self._route_shape, num_inputs - known)
        self._routes = rows if self._routes is None else np.concatenate([self._routes, rows])

    def _read(self, *, version: int) -> None:
        for role, tokens in self._unread:
            self._add(role, tokens, None, version)
        self._unread.clear()

    def _add(
        self,
        role: Role,
        tokens: npt.ArrayLike,
        logprobs: npt.NDArray[np.float32] | None,
        version: int,
    ) -> None:
        array = np.asarray(tokens, np.int32)
        start = self._segments[-1].route_rows[1] if self._segments else 0
        self._segments.append(
            Segment(array, role, False, logprobs, (start, start + len(array)), version)
        )

    def _number(self, version: str) -> int:
        if not (version.isascii() and version.isdecimal()) or len(version) > _MOST_DIGITS:
            raise self._rejected(
                "version",
                f"weight version {version!r} is not a number: its weights were never synced",
            )
        return int(version)

    def _rejected(self, reason: str, why: str) -> RolloutRejected:
        return RolloutRejected(reason, f"rollout {self._rollout_id}: {why}")
