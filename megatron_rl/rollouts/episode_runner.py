"""One rollout: the environment plays an episode, the scorer judges it."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteError
from megatron_rl.environments.environment import for_evaluation, open_environment
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.rewards import RewardRunner, open_scorer
from megatron_rl.rollouts.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.messages import (
    ENGINE_FAILURE,
    ENVIRONMENT_FAILURE,
    EXPIRED,
    Configure,
    FromCollector,
    GroupRequest,
)
from megatron_rl.rollouts.rejections import NO_VERDICT
from sglang_bridge.client import RequestExpired
from sglang_bridge.errors import EngineError
from sglang_bridge.generation import Generation, GenerationRejected

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """A rollout and its verdict.

    generated_at: when its last response was there, on the monotonic clock.
    """

    rollout: Rollout
    verdict: Verdict
    sampled_tokens: int
    generated_at: float


@dataclass(frozen=True)
class Rejected:
    """Why there is no rollout, and the tokens that were drawn for it nevertheless."""

    reason: str
    sampled_tokens: int


class EpisodeRunner:
    """Plays any number of episodes at a time on a node's engines.

    tell: says what happens to rank 0. threads: where replies are decoded and checked. Raises
    `PluginError` and `TokenizerError` on opening.
    """

    def __init__(
        self,
        configuration: Configure,
        tell: Callable[[FromCollector], Awaitable[None]],
        threads: Executor,
    ) -> None:
        routes = configuration.routes
        self._configuration = configuration
        self._threads = threads
        self._tokenizer = Tokenizer.from_directory(configuration.model_path)
        self._environment = open_environment(configuration.environment)
        self._rewards = RewardRunner(
            open_scorer(configuration.reward), timeout_s=configuration.reward.timeout_s
        )
        self._engines = EnginePool(
            configuration.engines,
            configuration.engine,
            RequestForm(
                api_key=configuration.api_key,
                longest_response=configuration.rollout.max_new_tokens,
                route_shape=None if routes is None else (routes.num_hidden_layers, routes.topk),
                vocab_size=configuration.vocab_size,
            ),
            tell,
            threads=threads,
        )
        self._reasons_logged: set[str] = set()

    async def play(self, request: GroupRequest, index: int) -> Judged | Rejected:
        """One judged rollout, or the reason why there is none."""
        # The environment's own time: responses have deadlines of their own.
        patience = self._configuration.environment.timeout_s
        clock = asyncio.timeout(patience)
        episode = self._open_episode(request, index, clock)
        environment = for_evaluation(self._environment) if request.evaluation else self._environment
        try:
            async with clock:
                await environment.play(episode)
            rollout = episode.rollout()
        except (RolloutRejected, RouteError, GenerationRejected) as error:
            return self._reject(episode, error.reason, error)
        except RequestExpired as error:
            return self._reject(episode, EXPIRED, error)
        except EngineError as error:
            return self._reject(episode, ENGINE_FAILURE, error)
        except Exception as error:  # the user's code: it may raise anything
            if clock.expired():
                error.add_note(
                    f"the environment took longer than environment.timeout_s={patience:g}"
                )
            return self._reject(episode, ENVIRONMENT_FAILURE, error)
        generated_at = time.monotonic()
        verdict = await self._rewards.judge(request.prompt, episode.text, rollout.finish_reason)
        if verdict.reward is None:
            self._log_first(NO_VERDICT, f"{rollout.rollout_id} has no verdict: {verdict.reason}")
        return Judged(rollout, verdict, episode.sampled_tokens, generated_at)

    async def close(self) -> None:
        await self._engines.close()

    def _open_episode(self, request: GroupRequest, index: int, clock: asyncio.Timeout) -> Episode:
        """clock: stands still while a response is drawn."""
        routes = None if request.evaluation else self._configuration.routes
        rollout_id = f"{request.group_id}/{index}"
        turns = itertools.count()

        async def generate(token_ids: Sequence[int], sampling: Sampling) -> Generation:
            clock.reschedule(None)
            try:
                return await self._engines.generate(
                    token_ids,
                    sampling,
                    rid=rollout_id,
                    return_routes=routes is not None,
                    seed=_seed(self._configuration.seed, rollout_id, next(turns)),
                )
            finally:
                clock.reschedule(
                    asyncio.get_running_loop().time() + self._configuration.environment.timeout_s
                )

        rules = EpisodeRules(
            sampling=request.sampling,
            routes=routes,
            train_truncated=self._configuration.rollout.train_truncated,
        )
        return Episode(
            request.prompt,
            generate,
            self._tokenizer,
            rules,
            rollout_id=rollout_id,
            sample_index=index,
            threads=self._threads,
        )

    def _reject(self, episode: Episode, reason: str, error: Exception) -> Rejected:
        self._log_first(reason, f"first rollout rejected for the reason {reason!r}", error)
        return Rejected(reason, episode.sampled_tokens)

    def _log_first(self, reason: str, text: str, error: Exception | None = None) -> None:
        if reason not in self._reasons_logged:
            self._reasons_logged.add(reason)
            _log.warning("%s; others like it are only counted", text, exc_info=error)


def _seed(run: int, rollout_id: str, turn: int) -> int:
    """63 bits that no other response of any run with another seed has, but by chance."""
    digest = hashlib.blake2b(f"{run}/{rollout_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
