"""One rollout: the environment runs an episode and the scorer gives a verdict."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from megatron_rl.contracts.group import NO_RESPONSE, Verdict
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteError
from megatron_rl.environments.environment import for_evaluation, open_environment
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.rewards import RewardRunner, open_scorer
from megatron_rl.rewards.runner import MAX_REASON_LENGTH, describe_failure, make_encodable
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
class ScoredRollout:
    """A rollout and its verdict.

    num_generated: tokens that engines sampled for it.
    generated_at: time of its last response, on the monotonic clock.
    """

    rollout: Rollout
    verdict: Verdict
    num_generated: int
    generated_at: float


@dataclass(frozen=True)
class RejectedRollout:
    """The reason why there is no rollout.

    num_generated: tokens that engines sampled for it nevertheless.
    environment_error: description of the environment's error, "" for other reasons.
    """

    reason: str
    num_generated: int
    environment_error: str = ""


class EpisodeRunner:
    """Runs any number of episodes at a time on a node's engines.

    report: sends a message to rank 0.
    threads: decode and check replies.
    Raises `PluginError` and `TokenizerError` on opening.
    """

    def __init__(
        self,
        configuration: Configure,
        report: Callable[[FromCollector], Awaitable[None]],
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
            report,
            threads=threads,
        )
        self._logged_reasons: set[str] = set()

    async def run(self, request: GroupRequest, index: int) -> ScoredRollout | RejectedRollout:
        """Run one episode and return its rollout with a verdict, or why there is none.

        index: place of the rollout in its group.
        """
        # The timeout covers the environment alone: responses have deadlines of their own.
        timeout_s = self._configuration.environment.timeout_s
        clock = asyncio.timeout(timeout_s)
        episode = self._open_episode(request, index, clock)
        environment = for_evaluation(self._environment) if request.evaluation else self._environment
        try:
            async with clock:
                await environment.play(episode)
            rollout = episode.rollout()
        except (RolloutRejected, RouteError, GenerationRejected) as error:
            is_silent = error.reason == NO_RESPONSE
            description = str(error) if is_silent else ""
            return self._reject(episode, error.reason, error, description)
        except RequestExpired as error:
            return self._reject(episode, EXPIRED, error)
        except EngineError as error:
            return self._reject(episode, ENGINE_FAILURE, error)
        except Exception as error:  # a user-defined environment may raise anything
            description = describe_failure(error)
            if clock.expired():
                description = (
                    f"the environment took longer than environment.timeout_s={timeout_s:g}"
                )
                error.add_note(description)
            return self._reject(episode, ENVIRONMENT_FAILURE, error, description)
        generated_at = time.monotonic()
        verdict = await self._rewards.score(request.prompt, episode.text, rollout.finish_reason)
        if verdict.reward is None:
            self._log_first(NO_VERDICT, f"{rollout.rollout_id} has no verdict: {verdict.reason}")
        return ScoredRollout(rollout, verdict, episode.sampled_tokens, generated_at)

    async def close(self) -> None:
        """Close the connections to the engines."""
        await self._engines.close()

    def _open_episode(self, request: GroupRequest, index: int, clock: asyncio.Timeout) -> Episode:
        """Open an episode.

        clock: the timeout of the environment. It stops while a response is sampled.
        """
        routes = None if request.evaluation else self._configuration.routes
        timeout_s = self._configuration.environment.timeout_s
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
                    seed=_response_seed(self._configuration.seed, rollout_id, next(turns)),
                )
            finally:
                clock.reschedule(asyncio.get_running_loop().time() + timeout_s)

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

    def _reject(
        self, episode: Episode, reason: str, error: Exception, environment_error: str = ""
    ) -> RejectedRollout:
        self._log_first(reason, f"first rollout rejected for the reason {reason!r}", error)
        description = make_encodable(environment_error, MAX_REASON_LENGTH)
        return RejectedRollout(reason, episode.sampled_tokens, description)

    def _log_first(self, reason: str, text: str, error: Exception | None = None) -> None:
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            _log.warning("%s; others like it are only counted", text, exc_info=error)


def _response_seed(run_seed: int, rollout_id: str, turn: int) -> int:
    """Derive 63 bits that differ between all responses of all runs with different seeds.

    Two of them are equal only by a hash collision.
    """
    digest = hashlib.blake2b(f"{run_seed}/{rollout_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
