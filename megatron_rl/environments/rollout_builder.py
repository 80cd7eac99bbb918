"""Builds a rollout: author and weight version of its tokens, and their routes.

The route of a token is the one recorded when the token was first an input.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from megatron_rl.contracts.group import ABORTED
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason, Role, Rollout, Segment
from megatron_rl.contracts.routes import Routes, RouteShape, validate_routes
from sglang_bridge.generation import Generation

_MAX_VERSION_DIGITS = 9


class RolloutRejected(ValueError):
    """A response that cannot become a rollout.

    reason: short name by which metrics count the rejection.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class RolloutBuilder:
    """Collects a prompt and everything after it.

    route_shape: shape of valid routes. None: routes are not recorded.

    Tokens that were not sampled are unread until a generation reads them. They then get its weight
    version.
    """

    def __init__(
        self, rollout_id: str, prompt: Prompt, sample_index: int, route_shape: RouteShape | None
    ) -> None:
        self._rollout_id = rollout_id
        self._prompt = prompt
        self._sample_index = sample_index
        self._route_shape = route_shape
        self._routes: Routes | None = None
        # Until `rollout` clips them, the segments' route_rows are positions of their tokens.
        self._segments: list[Segment] = []
        self._unread = [(Role.PROMPT, list(prompt.token_ids))]

    @property
    def tokens(self) -> list[int]:
        """All tokens so far, including unread ones."""
        tokens = [token for segment in self._segments for token in segment.tokens.tolist()]
        for _, unread_tokens in self._unread:
            tokens.extend(unread_tokens)
        return tokens

    @property
    def num_routes(self) -> int:
        """The number of inputs whose routes are known."""
        return 0 if self._routes is None else len(self._routes)

    def copy(self) -> RolloutBuilder:
        """Return a builder that has the same so far."""
        builder = RolloutBuilder(
            self._rollout_id, self._prompt, self._sample_index, self._route_shape
        )
        builder._routes = self._routes
        builder._segments = list(self._segments)
        builder._unread = list(self._unread)
        return builder

    def observe(self, tokens: list[int]) -> None:
        """Add tokens that receive no loss."""
        self._unread.append((Role.TOOL, tokens))

    def replace_observation(self, tokens: list[int]) -> None:
        """Take back what the last `observe` added, and add other tokens."""
        self._unread.pop()
        self.observe(tokens)

    def demonstrate(self, tokens: list[int]) -> None:
        """Add a response that was not sampled. Its version is 0, the start checkpoint."""
        self._mark_read(version=0)
        self._add_segment(Role.RESPONSE, tokens, None, version=0)

    def sample(self, generation: Generation) -> None:
        """Add the tokens that a generation sampled after all tokens so far.

        Raises `RolloutRejected` and `RouteError`.
        """
        if not len(generation.output_ids):
            raise self._rejection("empty", "the engine returned no token")
        if generation.finish_reason is FinishReason.ABORT:
            raise self._rejection(ABORTED, "the engine aborted it")
        versions = [self._version_number(span.version) for span in generation.version_spans]
        if versions != sorted(versions):
            raise self._rejection("versions", f"weight versions {versions} decrease")
        if self._route_shape is not None and generation.retractions and versions[0] != versions[-1]:
            # The engine read the tokens again with the last weights, which overwrote the routes of
            # tokens that older weights had sampled.
            raise self._rejection(
                "routes_rewritten", f"retracted while its weights changed, versions {versions}"
            )
        self._add(generation, versions)

    def _add(self, generation: Generation, versions: list[int]) -> None:
        self._append_routes(generation)
        # A retracted request is prefilled again, so the last version read its input last.
        self._mark_read(version=versions[-1] if generation.retractions else versions[0])
        for span, version in zip(generation.version_spans, versions, strict=True):
            window = slice(span.start, span.end)
            self._add_segment(
                Role.RESPONSE, generation.output_ids[window], generation.logprobs[window], version
            )

    def rollout_so_far(
        self, finish_reason: FinishReason, generation: Generation | None = None
    ) -> Rollout:
        """Return everything up to the last token of `generation`, which is not added.

        generation: the sampled part of a response. None: everything up to the last response.
        Raises `RolloutRejected` and `RouteError`.
        """
        builder = self.copy()
        if generation is not None:
            versions = [self._version_number(span.version) for span in generation.version_spans]
            builder._add(generation, versions)
        return builder.rollout(finish_reason, trainable=False)

    def rollout(self, finish_reason: FinishReason, *, trainable: bool) -> Rollout:
        """Return everything up to the last response. Raises `RolloutRejected`.

        trainable: whether the responses receive a loss.
        """
        if not self._segments:
            raise self._rejection("empty", "it has no response")
        num_inputs = self._segments[-1].route_rows[1] - 1
        if self._route_shape is not None and self.num_routes != num_inputs:
            raise self._rejection(
                "routes_missing",
                "its last response was not sampled and has no routes. "
                "Set train.replay=trainer or off",
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
        """Keep the routes of tokens that were inputs for the first time.

        A later generation may have all rows again. Only the rows after the known ones are new.
        """
        if self._route_shape is None:
            return
        if generation.routes is None:
            raise self._rejection("routes_missing", "the engine recorded no routes")
        num_inputs = len(self.tokens) + len(generation.output_ids) - 1
        num_new = num_inputs - self.num_routes
        has_all = len(generation.routes) != num_new
        rows = validate_routes(
            generation.routes[self.num_routes :] if has_all else generation.routes,
            self._route_shape,
            num_new,
        )
        self._routes = rows if self._routes is None else np.concatenate([self._routes, rows])

    def _mark_read(self, *, version: int) -> None:
        for role, tokens in self._unread:
            self._add_segment(role, tokens, None, version)
        self._unread.clear()

    def _add_segment(
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

    def _version_number(self, version: str) -> int:
        if not (version.isascii() and version.isdecimal()) or len(version) > _MAX_VERSION_DIGITS:
            raise self._rejection(
                "version",
                f"weight version {version!r} is not a number: its weights were never synced",
            )
        return int(version)

    def _rejection(self, reason: str, text: str) -> RolloutRejected:
        return RolloutRejected(reason, f"rollout {self._rollout_id}: {text}")
