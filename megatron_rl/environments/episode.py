"""What an environment can do with one prompt: let the model respond, show it something,
demonstrate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import msgspec

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import FinishReason, Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.environments.rollout_builder import RolloutBuilder, RolloutRejected
from megatron_rl.models.tokenizer import Tokenizer
from sglang_bridge.generation import Generation

Generate = Callable[[Sequence[int], Sampling], Awaitable[Generation]]


@dataclass(frozen=True)
class Response:
    """What the model answered in one turn: its text without the end-of-sequence token, and why it
    ended.
    """

    text: str
    finish_reason: FinishReason


@dataclass(frozen=True, kw_only=True)
class EpisodeRules:
    """sampling: its max_new_tokens is the token budget of all that follows the prompt. routes:
    None: not wanted.

    train_truncated: whether a rollout whose last response was cut off receives a loss.
    """

    sampling: Sampling
    routes: RouteShape | None
    train_truncated: bool


class Episode:
    """One rollout of `prompt` while it comes about.

    An environment calls `respond`, `observe` and `demonstrate` one after the other, in any order.
    `text` is what the scorer reads: the last response. `finish_reason` is why that one ended, None
    before the first. `sampled_tokens` counts what the engine generated, rejected or not. threads:
    where replies are checked and decoded; None: the event loop's own.
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
        threads: Executor | None = None,
    ) -> None:
        self.prompt = prompt
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.sampled_tokens = 0
        self._generate = generate
        self._tokenizer = tokenizer
        self._rules = rules
        self._threads = threads
        self._draft = RolloutBuilder(rollout_id, prompt, sample_index, rules.routes)

    async def respond(self) -> Response:
        """Let the model go on from all tokens so far: one trainable segment for each weight version
        it drew with.

        When the token budget is used up, or the last response was cut off, the engine is not asked:
        the response is empty and its finish reason LENGTH. Raises `RolloutRejected`, `RouteError`,
        `GenerationRejected` and `EngineError`, which an environment lets through.
        """
        if self._budget <= 0 or self.finish_reason is FinishReason.LENGTH:
            return self._end("", FinishReason.LENGTH)
        sampling = msgspec.structs.replace(self._rules.sampling, max_new_tokens=self._budget)
        generation = await self._generate(self._draft.tokens, sampling)
        self.sampled_tokens += len(generation.output_ids)
        if len(generation.output_ids) > sampling.max_new_tokens:
            raise RolloutRejected(
                "too_long",
                f"prompt {self.prompt.id}: the engine drew {len(generation.output_ids)} tokens, asked for at most "
                f"{sampling.max_new_tokens}",
            )
        # Long responses take tens of milliseconds to check: in a thread they hold up no other
        # episode.
        text = await asyncio.get_running_loop().run_in_executor(
            self._threads, self._take, generation
        )
        return self._end(text, generation.finish_reason)

    def observe(self, text: str) -> None:
        """Add text that nobody sampled, such as a tool's answer: read by the model, not trained.

        What follows the last response is left out of the rollout. Raises `UnknownText`.
        """
        self._draft.observe(list(self._tokenizer.encode(text)))

    def demonstrate(self, text: str) -> None:
        """Add a worked response and its end of sequence: trained, without log-probabilities, as
        nobody sampled it.

        Raises `RolloutRejected` when it does not fit the token budget, and `UnknownText`.
        """
        tokens = [*self._tokenizer.encode(text), self._tokenizer.eos_ids[0]]
        if len(tokens) > self._budget:
            raise RolloutRejected(
                "too_long",
                f"prompt {self.prompt.id}: a worked response of {len(tokens)} tokens, room for {self._budget}; raise "
                "rollout.max_new_tokens",
            )
        self._draft.demonstrate(tokens)
        self._end(text, FinishReason.STOP)

    def rollout(self) -> Rollout:
        """The rollout up to its last response. Raises `RolloutRejected`."""
        if self.finish_reason is None:
            raise RolloutRejected(
                "empty", f"prompt {self.prompt.id}: the environment asked for no response"
            )
        trainable = self._rules.train_truncated or self.finish_reason is FinishReason.STOP
        return self._draft.rollout(self.finish_reason, trainable=trainable)

    def _take(self, generation: Generation) -> str:
        self._draft.sample(generation)
        return self._tokenizer.decode(generation.output_ids.tolist())

    @property
    def _budget(self) -> int:
        """Tokens that may still follow."""
        used = len(self._draft.tokens) - len(self.prompt.token_ids)
        return self._rules.sampling.max_new_tokens - used

    def _end(self, text: str, finish_reason: FinishReason) -> Response:
        self.text, self.finish_reason = text, finish_reason
        return Response(text, finish_reason)
