"""One sample: the environment plays an episode, the scorer judges it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteError
from megatron_rl.environments.draft import RolloutRejected
from megatron_rl.environments.environment import for_evaluation, open_environment
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.rewards import RewardRunner, open_scorer
from megatron_rl.rollouts.engine_pool import EnginePool
from megatron_rl.rollouts.messages import ENGINE_FAILURE, ENVIRONMENT_FAILURE, Configure, GroupRequest
from sglang_bridge.errors import EngineError
from sglang_bridge.generation import Generation, GenerationRejected

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Judged:
    """A rollout and its verdict. generated_at: when its last response was there, on the monotonic clock."""

    rollout: Rollout
    verdict: Verdict
    sampled_tokens: int
    generate_seconds: float
    generated_at: float


@dataclass(frozen=True)
class Rejected:
    """Why there is no rollout, and the tokens that were drawn for it nevertheless."""

    reason: str
    sampled_tokens: int


class Player:
    """Plays any number of episodes at a time on a node's engines.

    Raises `DoorError` and `TokenizerError` on opening.
    """

    def __init__(self, configuration: Configure) -> None:
        routes = configuration.routes
        self._configuration = configuration
        self._tokenizer = Tokenizer.from_directory(configuration.model_path)
        self._environment = open_environment(configuration.environment)
        self._rewards = RewardRunner(open_scorer(configuration.reward), timeout_s=configuration.reward.timeout_s)
        self._engines = EnginePool(
            configuration.engines,
            configuration.engine,
            api_key=configuration.api_key,
            route_shape=None if routes is None else (routes.num_hidden_layers, routes.topk),
        )
        self._reasons_logged: set[str] = set()

    async def play(self, request: GroupRequest, index: int) -> Judged | Rejected:
        """One judged rollout, or the reason why there is none."""
        episode = self._open_episode(request, index)
        environment = for_evaluation(self._environment) if request.evaluation else self._environment
        start = time.monotonic()
        try:
            await environment.play(episode)
            rollout = episode.rollout()
        except (RolloutRejected, RouteError, GenerationRejected) as error:
            return self._reject(episode, error.reason, error)
        except EngineError as error:
            return self._reject(episode, ENGINE_FAILURE, error)
        except Exception as error:  # the user's code: it may raise anything
            return self._reject(episode, ENVIRONMENT_FAILURE, error)
        end = time.monotonic()
        verdict = await self._rewards.judge(request.prompt, episode.text, rollout.finish_reason)
        return Judged(rollout, verdict, episode.sampled_tokens, end - start, end)

    async def close(self) -> None:
        await self._engines.close()

    def _open_episode(self, request: GroupRequest, index: int) -> Episode:
        routes = None if request.evaluation else self._configuration.routes
        rollout_id = f"{request.group_id}/{index}"

        async def generate(token_ids: Sequence[int], sampling: Sampling) -> Generation:
            return await self._engines.generate(token_ids, sampling, rid=rollout_id, return_routes=routes is not None)

        rules = EpisodeRules(
            sampling=request.sampling, routes=routes, train_truncated=self._configuration.rollout.train_truncated
        )
        return Episode(request.prompt, generate, self._tokenizer, rules, rollout_id=rollout_id, sample_index=index)

    def _reject(self, episode: Episode, reason: str, error: Exception) -> Rejected:
        if reason not in self._reasons_logged:
            self._reasons_logged.add(reason)
            _log.warning("first rollout rejected for the reason %r; others are only counted", reason, exc_info=error)
        return Rejected(reason, episode.sampled_tokens)
