"""Actions of an environment in one episode: sample a response, add text, or demonstrate."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_rl.contracts.group import ENDLESS, ENVIRONMENT_FAILURE, NO_RESPONSE
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason, Rollout
from megatron_rl.contracts.routes import RouteError, RouteShape
from megatron_rl.environments.chat_turns import ChatTurns
from megatron_rl.environments.rollout_builder import RolloutBuilder, RolloutRejected
from megatron_rl.models.tokenizer import Tokenizer
from sglang_bridge.generation import Generation

# Responses after the token budget is used up: an environment that requests more never ends
_MAX_EMPTY_RESPONSES = 100
# Checking so much takes less than a millisecond: too little for another thread.
_SHORT_RESPONSE_TOKENS = 512
_SMALL_ROUTES_BYTES = 256 * 1024

RESPONSE_PENDING = (
    "a response of this episode is pending. Await episode.respond() before the next action"
)

Generate = Callable[[Sequence[int], Sampling], Awaitable[Generation]]


@dataclass(frozen=True)
class Response:
    """Response of the model in one turn.

    text: decoded, without the end-of-sequence token.
    """

    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class EpisodeRules:
    """Settings that all episodes share.

    sampling: its max_new_tokens is the token budget for everything after the prompt.
    routes: shape of the routes to record, None to record none.
    train_truncated: whether a rollout whose last response was cut off receives a loss.
    """

    sampling: Sampling
    routes: RouteShape | None
    train_truncated: bool


class Episode:
    """One rollout of `prompt` while it is being played.

    An environment awaits `respond` and calls `observe` and `demonstrate`, one after the other and
    in any order. An action while a response is pending raises ValueError.

    text: last response. The scorer reads it.
    finish_reason: why the last response ended, None before the first.
    sampled_tokens: number of tokens that engines generated and that were not sampled again.
    rejected_tokens: number of tokens of responses that could not be used, by the reason. `generate`
    counts them, and the episode those of a response that is withdrawn while a thread adds it.

    generate: sends a request to an engine.
    threads: where long replies are checked and decoded. None: the event loop's default executor.
    chat_turns: renders messages, None for an environment without `chat_roles`.
    """

    def __init__(
        self,
        prompt: Prompt,
        generate: Generate,
        tokenizer: Tokenizer,
        rules: EpisodeRules,
        *,
        rollout_id: str,
        sample_index: int = 0,
        rejected_tokens: Counter[str] | None = None,
        threads: Executor | None = None,
        chat_turns: ChatTurns | None = None,
    ) -> None:
        self.prompt = prompt
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.sampled_tokens = 0
        self.rejected_tokens = Counter[str]() if rejected_tokens is None else rejected_tokens
        self._num_empty_responses = 0
        self._is_adding = False
        self._pending: object | None = None  # the response that is being sampled
        # Those since the last response. None: `observe_messages` cannot follow
        self._messages: list[Mapping[str, Any]] | None = None
        # An empty turn after it leaves the last response as it ended
        self._last_end: FinishReason | None = None
        self._generate = generate
        self._tokenizer = tokenizer
        self._rules = rules
        self._threads = threads
        self._chat_turns = chat_turns
        self._builder = RolloutBuilder(rollout_id, prompt, sample_index, rules.routes)

    async def respond(self) -> Response:
        """Let the model continue all tokens so far.

        Adds one trainable segment for each weight version that sampled tokens. No request is sent
        after the token budget is used up or a response was cut off: the response is then empty, and
        its finish reason is LENGTH.

        Raises `RolloutRejected`, `RouteError`, `GenerationRejected` and `EngineError`. An
        environment should not catch them. If it is cancelled, the episode stays as it was.
        """
        self._require_rest()
        budget = self._budget
        if budget <= 0 or self.finish_reason is FinishReason.LENGTH:
            return self._end_empty_turn()
        pending = self._pending = object()
        try:
            sampling = msgspec.structs.replace(self._rules.sampling, max_new_tokens=budget)
            generation = await self._generate(self._builder.tokens, sampling)
            num_generated = len(generation.output_ids)
            self.sampled_tokens += num_generated
            if num_generated > budget:
                raise RolloutRejected(
                    "too_long",
                    f"prompt {self.prompt.id}: the engine sampled {num_generated} tokens, "
                    f"but the request allowed {budget}",
                )
            try:
                self._builder, text = await self._add(generation)
            except asyncio.CancelledError:
                self.sampled_tokens -= num_generated
                self.rejected_tokens[ENVIRONMENT_FAILURE] += num_generated
                raise
            self._last_end = generation.finish_reason
            return self._end_turn(text, generation.finish_reason)
        finally:
            if self._pending is pending:
                self._pending = None

    def withdraw(self) -> None:
        """Take back the request for a response, which is being cancelled."""
        self._pending = None

    @property
    def num_routes(self) -> int:
        """The number of inputs whose routes are known. A response need not bring them again."""
        return self._builder.num_routes

    @property
    def is_adding(self) -> bool:
        """True while a thread adds a response, which `frozen_copy` would lack."""
        return self._is_adding

    def frozen_copy(self) -> Episode:
        """Return the episode as it is, for `rollout_so_far` in another thread."""
        episode = copy.copy(self)
        episode._builder = self._builder.copy()
        return episode

    def rollout_so_far(self, response: Generation | None) -> Rollout | None:
        """Return the rollout up to the last token that was sampled, None before the first one.

        response: the sampled part of the open response. It is omitted if it cannot be used.
        """
        if response is not None:
            with contextlib.suppress(RolloutRejected, RouteError):
                return self._builder.rollout_so_far(FinishReason.ABORT, response)
        if self._last_end is None or not self.sampled_tokens:
            return None
        try:
            return self._builder.rollout_so_far(self._last_end)
        except RolloutRejected:
            return None

    def observe(self, text: str) -> None:
        """Add text that was not sampled, such as a tool's answer. The model reads it as input.

        It receives no loss. The rollout ends with its last response, without text after it.
        The names of control tokens in it are text.
        Raises `UnknownText`, and ValueError while a response is pending.
        """
        self._require_rest()
        limit = self._rules.sampling.max_new_tokens
        text = self._tokenizer.quote(text)
        self._builder.observe(list(self._tokenizer.encode_continuation(text, at_most=limit)))
        self._messages = None

    def observe_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Add messages of a chat after a response, up to where the model's next one begins.

        The chat template of the model renders them, so the environment writes no special tokens.
        They are read like the text of `observe`. Several calls in a row add messages to one turn.
        After a response that was cut off, there is no next one, and nothing is added.

        Raises ValueError for roles that are not in the environment's `chat_roles`, before the first
        response, after `observe`, and while a response is pending. Raises `UnknownText`, and
        `RolloutRejected` if the response ended with another token than the template writes.
        """
        self._require_rest()
        if self._chat_turns is None:
            raise ValueError(
                "the environment names no roles. Set chat_roles = ('tool',) in its class"
            )
        if self._messages is None:
            raise ValueError(
                "observe_messages must follow a response. Await episode.respond() first, and add "
                "text with episode.observe afterwards"
            )
        all_messages = [*self._messages, *messages]
        limit = self._rules.sampling.max_new_tokens
        end, *tokens = self._chat_turns.tokens_from_end(all_messages, at_most=limit)
        if self.finish_reason is FinishReason.LENGTH or not all_messages:
            return
        if self._messages:
            self._builder.replace_observation(tokens)
        elif (last := self._builder.tokens[-1]) == end:
            self._builder.observe(tokens)
        else:
            raise RolloutRejected(
                "other_end",
                f"prompt {self.prompt.id}: the response ended with "
                f"{self._tokenizer.token_text(last)!r}, but the chat template ends it with "
                f"{self._tokenizer.token_text(end)!r} before other messages",
            )
        self._messages = all_messages

    def demonstrate(self, text: str) -> None:
        """Add a demonstration, and an end-of-sequence token if it has none.

        It receives a loss and has no log-probabilities, because it was not sampled.
        Raises `UnknownText`, `RolloutRejected` if it does not fit the token budget, and ValueError
        if it goes on after its end, and while a response is pending.
        """
        self._require_rest()
        tokens = list(self._tokenizer.encode_response(text, self._builder.tokens[-1]))
        budget = self._budget
        if len(tokens) > budget:
            raise RolloutRejected(
                "too_long",
                f"prompt {self.prompt.id}: its demonstration has {self._num_added + len(tokens)} "
                f"tokens, and rollout.max_new_tokens={self._rules.sampling.max_new_tokens}. Raise "
                "it, or shorten the demonstration",
            )
        self._builder.demonstrate(tokens)
        self._end_turn(self._tokenizer.decode(tokens), FinishReason.STOP)

    def rollout(self) -> Rollout:
        """Return the rollout up to its last response. Raises `RolloutRejected`."""
        if self.finish_reason is None:
            raise RolloutRejected(
                NO_RESPONSE, f"prompt {self.prompt.id}: the environment requested no response"
            )
        trainable = self._rules.train_truncated or self.finish_reason is FinishReason.STOP
        return self._builder.rollout(self.finish_reason, trainable=trainable)

    async def _add(self, generation: Generation) -> tuple[RolloutBuilder, str]:
        """Return a builder that also has a response, and the response's text.

        A long one takes tens of milliseconds. In a thread, it delays no other episode. The thread
        goes on if the environment gives the response up meanwhile.
        """
        builder = self._builder.copy()
        num_route_bytes = 0 if generation.routes is None else generation.routes.nbytes
        is_short = len(generation.output_ids) <= _SHORT_RESPONSE_TOKENS
        if is_short and num_route_bytes <= _SMALL_ROUTES_BYTES:
            return self._add_and_decode(builder, generation)
        self._is_adding = True
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._threads, self._add_and_decode, builder, generation
            )
        finally:
            self._is_adding = False

    def _add_and_decode(
        self, builder: RolloutBuilder, generation: Generation
    ) -> tuple[RolloutBuilder, str]:
        builder.sample(generation)
        return builder, self._tokenizer.decode(generation.output_ids.tolist())

    def _require_rest(self) -> None:
        if self._pending is not None:
            raise ValueError(RESPONSE_PENDING)

    @property
    def _budget(self) -> int:
        """Number of tokens that may follow."""
        return self._rules.sampling.max_new_tokens - self._num_added

    @property
    def _num_added(self) -> int:
        """Number of tokens after the prompt."""
        return len(self._builder.tokens) - len(self.prompt.token_ids)

    def _end_empty_turn(self) -> Response:
        """Respond with nothing. Raises `RolloutRejected` for an environment that never ends."""
        self._num_empty_responses += 1
        if self._num_empty_responses > _MAX_EMPTY_RESPONSES:
            raise RolloutRejected(
                ENDLESS,
                f"prompt {self.prompt.id}: the environment requested {_MAX_EMPTY_RESPONSES} "
                "responses after its token budget was used up. End an episode when the "
                "finish_reason of a response is LENGTH",
            )
        return self._end_turn("", FinishReason.LENGTH)

    def _end_turn(self, text: str, finish_reason: FinishReason) -> Response:
        self.text = text
        self.finish_reason = finish_reason
        self._messages = []
        return Response(text, finish_reason)
