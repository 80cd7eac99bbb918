"""One rollout: the environment runs an episode and the scorer gives a verdict."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from pathlib import Path
from typing import Any

from megatron_rl.contracts.group import ENDLESS, ENVIRONMENT_FAILURE, NO_RESPONSE
from megatron_rl.contracts.plugins import hide_values
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.routes import RouteError
from megatron_rl.environments.environment import open_role_turns
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.environments.rollout_builder import RolloutRejected
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.rewards import RewardRunner
from megatron_rl.rewards.runner import MAX_REASON_LENGTH, describe_failure, make_encodable
from megatron_rl.rewards.user_calls import Ending, Outcome
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.collector.progress import (
    NOT_RESTORED,
    EpisodeProgress,
    RejectedRollout,
    ScoredRollout,
    is_unfinished,
)
from megatron_rl.rollouts.user_process.attempts import EpisodeAttempt
from megatron_rl.rollouts.user_process.serving_process import UserCodeError
from megatron_rl.rollouts.user_process.user_classes import UserClasses
from megatron_rl.rollouts.wire.messages import (
    ENGINE_FAILURE,
    EXPIRED,
    PROCESS_LOST,
    Configure,
    FromCollector,
    GroupRequest,
)
from megatron_rl.rollouts.wire.rejections import NO_VERDICT
from megatron_rl.rollouts.wire.repetition import RepetitionStop
from sglang_bridge.client import RequestExpired
from sglang_bridge.errors import EngineError
from sglang_bridge.generation import Generation, GenerationRejected

# Tokens of an episode that began again, because another one had ended the environment's process
RESTARTED = "environment_restarted"

_log = logging.getLogger(__name__)


class EpisodeRunner:
    """Runs any number of episodes at a time on a node's engines.

    report: sends a message to rank 0.
    threads: decode and check long replies. node: whose engines are preferred.
    Raises `Failure` on opening.
    """

    def __init__(
        self,
        configuration: Configure,
        report: Callable[[FromCollector], Awaitable[None]],
        threads: Executor,
        node: int = 0,
    ) -> None:
        routes = configuration.routes
        self._configuration = configuration
        self._report = report
        self._threads = threads
        self._tokenizer = Tokenizer.from_directory(configuration.model_path)
        self._user_classes = UserClasses(configuration, report)
        self._chat_turns = open_role_turns(
            self._user_classes.chat_roles, Path(configuration.model_path), self._tokenizer
        )
        self._rewards = RewardRunner(self._user_classes.scorer, hide_values=self._hide_values)
        self.engines = EnginePool(
            configuration.engine,
            RequestForm(
                api_key=configuration.api_key,
                longest_response=configuration.rollout.max_new_tokens,
                route_shape=None if routes is None else (routes.num_hidden_layers, routes.topk),
                vocab_size=configuration.vocab_size,
            ),
            report,
            node=node,
            threads=threads,
        )
        self._logged_reasons: set[str] = set()
        self._announced: set[tuple[str, int]] = set()  # group and attempt of each request

    def announce(self, request: GroupRequest) -> None:
        """Let episodes of a request get responses, from now on until `forget`."""
        self._announced.add((request.group_id, request.attempt))

    def _is_announced(self, request: GroupRequest) -> bool:
        return (request.group_id, request.attempt) in self._announced

    async def stop(self, request: GroupRequest) -> int:
        """Sample nothing more for a request, and return the tokens that engines have sampled.

        Its episodes wait until they are cancelled. A request that is forgotten has no tokens, and
        stays as it is.
        """
        if not self._is_announced(request):
            return 0
        return await self.engines.stop(request.group_id)

    def forget(self, request: GroupRequest) -> None:
        """Sample nothing more for a request."""
        if self._is_announced(request):
            self._announced.remove((request.group_id, request.attempt))
            self.engines.forget(request.group_id)

    async def run(
        self, request: GroupRequest, index: int, progress: EpisodeProgress | None = None
    ) -> ScoredRollout | RejectedRollout:
        """Run one episode and return its rollout with a verdict, or why there is none.

        request: a request that was announced. Once it is forgotten, its episode gets no response.
        index: place of the rollout in its group. progress: follows the episode, and has what a
        checkpoint had of it.
        Raises `Failure` if a user-defined class cannot be opened again.
        """
        progress = progress or EpisodeProgress()
        episodes: list[Episode] = []

        def open_attempt() -> EpisodeAttempt:
            progress.stop = self._open_stop(request)
            progress.episode = self._open_episode(request, index, progress)
            episodes.append(progress.episode)
            return EpisodeAttempt(progress.episode)

        subject = f"group {request.group_id}, rollout {index}"
        outcome = await self._user_classes.environment.play(
            open_attempt, is_evaluation=request.evaluation, subject=subject
        )
        progress.demand(wants_slot=False)
        *lost_episodes, episode = episodes
        episode.rejected_tokens += _tokens_of(lost_episodes)
        episode.rejected_tokens += Counter({NOT_RESTORED: progress.drop_stored()})
        if outcome.ending is Ending.RETURNED:
            progress.outcome = await self._score(
                request, episode, subject, is_repetitive=progress.is_repetitive
            )
        else:
            progress.outcome = self._reject(episode, *self._describe(outcome), outcome.error)
        return progress.outcome

    async def _score(
        self, request: GroupRequest, episode: Episode, subject: str, *, is_repetitive: bool
    ) -> ScoredRollout | RejectedRollout:
        """Return the rollout of an episode that has ended, with a verdict."""
        try:
            rollout = episode.rollout()
        except RolloutRejected as error:
            return self._reject(episode, *_describe_error(error), error)
        generated_at = time.monotonic()
        verdict = await self._rewards.score(
            request.prompt, episode.text, rollout.finish_reason, subject=subject
        )
        if verdict.reward is None:
            self._log_first(NO_VERDICT, f"{rollout.rollout_id} has no verdict: {verdict.reason}")
        return ScoredRollout(
            rollout,
            verdict,
            episode.sampled_tokens,
            episode.rejected_tokens,
            generated_at,
            is_repetitive=is_repetitive,
        )

    async def close(self) -> None:
        """Close the connections to the engines, and end the processes of user-defined classes."""
        await self._user_classes.close()
        await self.engines.close()

    def _open_stop(self, request: GroupRequest) -> RepetitionStop | None:
        """Return what ends responses that repeat themselves. Evaluations measure whole ones."""
        threshold = self._configuration.rollout.stop_repetition
        if request.evaluation or threshold is None:
            return None
        return RepetitionStop(threshold)

    def _open_episode(
        self,
        request: GroupRequest,
        index: int,
        progress: EpisodeProgress,
    ) -> Episode:
        """Open an episode.

        progress: has the responses that are stored, and receives the pieces of others.
        """
        rules = self._rules(request)
        rollout_id = f"{request.group_id}/{index}"
        turns = itertools.count()
        rejected_tokens = Counter[str]()
        stop = progress.stop

        async def generate(token_ids: Sequence[int], sampling: Sampling) -> Generation:
            turn = next(turns)
            generation = progress.take_stored(token_ids, rejected_tokens)
            if generation is not None and not is_unfinished(generation):
                return generation
            pieces = [] if generation is None else [generation]
            progress.pieces = pieces
            progress.demand(wants_slot=True)
            num_sampled = episode.sampled_tokens + sum(len(piece.output_ids) for piece in pieces)
            try:
                return await self.engines.generate(
                    token_ids,
                    sampling,
                    rid=rollout_id,
                    return_routes=rules.routes is not None,
                    rejected_tokens=rejected_tokens,
                    seed=_response_seed(self._configuration.seed, rollout_id, turn),
                    priority=request.priority(num_sampled),
                    is_wanted=partial(self._is_announced, request),
                    pieces=pieces,
                    stop=stop,
                    num_known_routes=episode.num_routes,
                )
            except BaseException as error:
                rejected_tokens.update(_tokens_of_pieces(pieces, error))
                raise
            finally:
                progress.pieces = []  # the episode has them
                progress.demand(wants_slot=False)

        episode = Episode(
            request.prompt,
            generate,
            self._tokenizer,
            rules,
            rollout_id=rollout_id,
            sample_index=index,
            rejected_tokens=rejected_tokens,
            threads=self._threads,
            chat_turns=self._chat_turns,
        )
        return episode

    def _rules(self, request: GroupRequest) -> EpisodeRules:
        return EpisodeRules(
            sampling=request.sampling,
            routes=None if request.evaluation else self._configuration.routes,
            train_truncated=self._configuration.rollout.train_truncated,
        )

    def _describe(self, outcome: Outcome[Any]) -> tuple[str, str]:
        """Return why an episode failed, and the description of the environment's error."""
        timeout = f"environment.timeout_s={self._configuration.environment.timeout_s:g}"
        match outcome.ending:
            case Ending.TIMED_OUT:
                return ENVIRONMENT_FAILURE, f"the environment took longer than {timeout}"
            case Ending.IGNORED:
                return ENVIRONMENT_FAILURE, f"it ignored its cancellation after {timeout}"
            case Ending.LOST:
                return PROCESS_LOST, ""
            case Ending.CANCELLED:
                return ENVIRONMENT_FAILURE, "the environment cancelled itself"
        assert outcome.error is not None
        return _describe_error(outcome.error)

    def _reject(
        self, episode: Episode, reason: str, environment_error: str, error: BaseException | None
    ) -> RejectedRollout:
        """Log and return a rejection. environment_error: "" if the environment has none."""
        text = f"first rollout rejected for the reason {reason!r}"
        if not isinstance(error, Exception):  # a cancellation does not name its cause
            text += f": {environment_error}"
        self._log_first(reason, text, error)
        description = make_encodable(self._hide_values(environment_error), MAX_REASON_LENGTH)
        tokens = episode.rejected_tokens + Counter({reason: episode.sampled_tokens})
        return RejectedRollout(reason, tokens, description)

    def _log_first(self, reason: str, text: str, error: BaseException | None = None) -> None:
        if reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            trace = "" if error is None else _trace_of(error)
            _log.warning(
                "%s; others like it are only counted\n%s",
                self._hide_values(text),
                self._hide_values(trace),
            )

    def _hide_values(self, text: str) -> str:
        """Leave the values of environment variables in options out of a text that is reported."""
        reward = self._configuration.reward
        options = [reward.options, self._configuration.environment.options]
        options += [part.options for part in reward.parts.values()]
        return hide_values(text, options)


def _describe_error(error: BaseException) -> tuple[str, str]:
    """Return the reason for a rejection, and the description of the environment's error, if any."""
    match error:
        case RolloutRejected() | RouteError() | GenerationRejected():
            is_at_fault = error.reason in (NO_RESPONSE, ENDLESS)
            return error.reason, str(error) if is_at_fault else ""
        case RequestExpired():
            return EXPIRED, ""
        case EngineError():
            return ENGINE_FAILURE, ""
        case UserCodeError():
            return ENVIRONMENT_FAILURE, str(error)
    return ENVIRONMENT_FAILURE, describe_failure(error)


def _tokens_of_pieces(pieces: Sequence[Generation], error: BaseException) -> Counter[str]:
    """Count the tokens of a response that cannot be completed, by the reason: no rollout has it."""
    reason, _ = _describe_error(error)
    return +Counter({reason: sum(len(piece.output_ids) for piece in pieces)})


def _trace_of(error: BaseException) -> str:
    if isinstance(error, UserCodeError):
        return error.trace
    return "".join(traceback.format_exception(error))


def _tokens_of(lost_episodes: Sequence[Episode]) -> Counter[str]:
    """Count the tokens of episodes that began again, by the reason why they are not used."""
    tokens = Counter[str]()
    for episode in lost_episodes:
        tokens += episode.rejected_tokens + Counter({RESTARTED: episode.sampled_tokens})
        # Of the response that was being sampled. Its environment was not at fault
        tokens[RESTARTED] += tokens.pop(ENVIRONMENT_FAILURE, 0)
    return +tokens


def _response_seed(run_seed: int, rollout_id: str, turn: int) -> int:
    """Derive 63 bits that differ between all responses of all runs with different seeds.

    Two of them are equal only by a hash collision.
    """
    digest = hashlib.blake2b(f"{run_seed}/{rollout_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
