"""Groups while a collector samples them, from the start that a checkpoint had of them."""

from __future__ import annotations

import copy
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.contracts.group import Group, RolloutRef, Verdict
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.environments.episode import Episode
from megatron_rl.rollouts.collector.engines.partial_response import PartialResponse
from megatron_rl.rollouts.collector.stored_responses import StoredResponse, responses_of
from megatron_rl.rollouts.wire.repetition import RepetitionStop
from sglang_bridge.generation import FinishReason, Generation

# Tokens of a stored rollout that its environment did not ask for when it played it again
NOT_RESTORED = "not_restored"
NO_VERDICT_YET = Verdict(reward=None, correctness=None)


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout and its verdict.

    num_generated: tokens that engines sampled and that are part of it.
    rejected_tokens: tokens of its responses that could not be used and were sampled again, by the
    reason.
    generated_at: time of its last response, on the monotonic clock. 0 for one of a checkpoint.
    is_repetitive: its last response was cut off, because it repeated itself.
    """

    rollout: Rollout
    verdict: Verdict
    num_generated: int
    rejected_tokens: Mapping[str, int]
    generated_at: float
    is_repetitive: bool = False


@dataclass(frozen=True)
class RejectedRollout:
    """The reason why there is no rollout.

    rejected_tokens: tokens that engines sampled for it nevertheless, by the reason why they are not
    used.
    environment_error: description of the environment's error, "" for other reasons.
    """

    reason: str
    rejected_tokens: Mapping[str, int]
    environment_error: str = ""


def _ignore() -> None:
    """Do nothing."""


@dataclass(eq=False)
class EpisodeProgress:
    """The state of one rollout.

    stored_responses: responses from a checkpoint that its environment has not asked for yet.
    episode: the episode while it is played, None before it begins. stop: ends responses that repeat
    themselves. pieces: parts of the response that is being sampled. outcome: None until it is
    scored or rejected.
    wants_slot: False while it needs no engine, as between two responses and at its end.
    on_demand: called when that changes.
    """

    stored_responses: deque[StoredResponse] = field(default_factory=deque)
    episode: Episode | None = None
    stop: RepetitionStop | None = None
    pieces: list[Generation] = field(default_factory=list)
    outcome: ScoredRollout | RejectedRollout | None = None
    wants_slot: bool = True
    on_demand: Callable[[], None] = _ignore

    def demand(self, *, wants_slot: bool) -> None:
        """Note whether it needs an engine."""
        if wants_slot != self.wants_slot:
            self.wants_slot = wants_slot
            self.on_demand()

    @property
    def is_changing(self) -> bool:
        """True while the episode takes a response."""
        is_adding = self.episode is not None and self.episode.is_adding
        return is_adding or bool(self.stored_responses)

    @property
    def is_repetitive(self) -> bool:
        """True once a response of the episode was cut off, because it repeated itself."""
        return self.stop is not None and self.stop.has_stopped

    def take_stored(
        self, token_ids: Sequence[int], rejected_tokens: Counter[str]
    ) -> Generation | None:
        """Return the stored response to these tokens, None without one.

        rejected_tokens: receives the tokens of stored responses that are dropped, because the
        environment asks for another one.
        """
        responses = self.stored_responses
        if responses and responses[0].input_ids == list(token_ids):
            response = responses.popleft()
            if response.is_repetitive and self.stop is not None:
                self.stop.has_stopped = True
            return response.generation
        rejected_tokens += Counter({NOT_RESTORED: self.drop_stored()})
        return None

    def drop_stored(self) -> int:
        """Drop all stored responses. Returns the number of their tokens."""
        num_tokens = sum(response.num_tokens for response in self.stored_responses)
        self.stored_responses.clear()
        return num_tokens

    def frozen_copy(self) -> EpisodeProgress:
        """Return the state as it is, for `rollout_so_far` in another thread."""
        return replace(
            self,
            episode=None if self.episode is None else self.episode.frozen_copy(),
            stop=copy.copy(self.stop),
            pieces=list(self.pieces),
        )

    def rollout_so_far(self, sampling: Sampling) -> Rollout | None:
        """Return everything up to the last sampled token, None before the first one."""
        if self.episode is None:
            return None
        response = None
        if self.pieces:
            response = PartialResponse((), sampling, self.pieces).generation()
        return self.episode.rollout_so_far(response)


class GroupProgress:
    """The state of a group.

    indices: sample indices of its request. start: what a checkpoint had of it, None without one.
    `restore` has to follow then.
    first_results: the finished rollouts of `start`. episodes: the others, by sample index.
    on_demand: called when an episode needs an engine, or needs none any more.
    """

    def __init__(
        self,
        prompt: Prompt,
        sampling: Sampling,
        indices: Iterable[int],
        *,
        start: Group | None = None,
        on_demand: Callable[[], None] = _ignore,
    ) -> None:
        self._prompt = prompt
        self._sampling = sampling
        self.first_results: list[ScoredRollout] = []
        self.rejections = Counter[str]()
        self.rejected_tokens = Counter[str]()
        self.environment_error = ""
        self._start = start
        if start is not None:
            indices = (*start.open_samples, *(ref.sample_index for ref in start.rollouts))
        self.episodes = {index: EpisodeProgress(on_demand=on_demand) for index in indices}

    @property
    def is_changing(self) -> bool:
        """True until it is restored, and while an episode takes a response.

        The sampled part of the response cannot be read then.
        """
        is_restored = self._start is None
        return not is_restored or any(p.is_changing for p in self.episodes.values())

    @property
    def demand(self) -> int:
        """The number of rollouts that have a slot of an engine or wait for one."""
        return sum(progress.wants_slot for progress in self.episodes.values())

    @property
    def outcomes(self) -> list[ScoredRollout | RejectedRollout]:
        """The outcomes of all episodes that have one."""
        outcomes = (progress.outcome for progress in self.episodes.values())
        return [outcome for outcome in outcomes if outcome is not None]

    def results(self) -> list[ScoredRollout]:
        """Return all rollouts with their verdicts, by sample index."""
        results = [outcome for outcome in self.outcomes if isinstance(outcome, ScoredRollout)]
        return sorted(self.first_results + results, key=lambda result: result.rollout.sample_index)

    def count_rejections(self) -> dict[str, int]:
        """Return the number of rejected rollouts, by reason."""
        reasons = (o.reason for o in self.outcomes if isinstance(o, RejectedRollout))
        return dict(self.rejections + Counter(reasons))

    def count_rejected_tokens(self) -> Counter[str]:
        """Return the tokens that are not used, by reason. Those of open episodes are not known."""
        tokens = Counter(self.rejected_tokens)
        for outcome in self.outcomes:
            tokens.update(outcome.rejected_tokens)
        return tokens

    def first_environment_error(self) -> str:
        """Return the first error of the environment, "" without one."""
        errors = [o.environment_error for o in self.outcomes if isinstance(o, RejectedRollout)]
        return next((error for error in [self.environment_error, *errors] if error), "")

    def open_samples(self) -> tuple[int, ...]:
        """Return the sample indices without an outcome."""
        return tuple(i for i, progress in self.episodes.items() if progress.outcome is None)

    def open_results(self) -> Iterator[ScoredRollout]:
        """Return the open rollouts that have sampled tokens, as if they had a verdict.

        They show the state at this call, also if another thread makes them later, one by one.
        """
        parts = [self.episodes[index].frozen_copy() for index in self.open_samples()]
        for_each = (_open_result(part, self._sampling) for part in parts)
        return (result for result in for_each if result is not None)

    def tokens_rejected_in_open_episodes(self) -> Counter[str]:
        """Return the tokens of open episodes that are not used, by reason."""
        tokens = Counter[str]()
        for index in self.open_samples():
            episode = self.episodes[index].episode
            if episode is not None:
                tokens.update(episode.rejected_tokens)
        return tokens

    def restore(self, rollouts: Mapping[int, Rollout], shape: RouteShape | None) -> None:
        """Take over what the checkpoint had of it.

        rollouts: by sample index. Missing ones are sampled anew, and their tokens are
        counted as `NOT_RESTORED`. shape: of the engines' routes.
        """
        start = self._start
        assert start is not None
        self.rejections.update(start.rejections)
        self.rejected_tokens.update(start.rejected_tokens)
        self.environment_error = start.environment_error
        for ref in start.rollouts:
            rollout = rollouts.get(ref.sample_index)
            if rollout is None:
                self.rejected_tokens[NOT_RESTORED] += ref.num_generated
            elif ref.sample_index in start.open_samples:
                responses = responses_of(rollout, shape, is_repetitive=ref.is_repetitive)
                self.episodes[ref.sample_index].stored_responses.extend(responses)
            else:
                del self.episodes[ref.sample_index]
                self.first_results.append(_finished_result(rollout, ref))
        self._start = None


def _finished_result(rollout: Rollout, ref: RolloutRef) -> ScoredRollout:
    """Return a finished rollout of a checkpoint."""
    return ScoredRollout(
        rollout, ref.verdict, ref.num_generated, {}, 0.0, is_repetitive=ref.is_repetitive
    )


def _open_result(progress: EpisodeProgress, sampling: Sampling) -> ScoredRollout | None:
    """Return the sampled part of a rollout as if it had a verdict, None before its first token."""
    rollout = progress.rollout_so_far(sampling)
    if rollout is None:
        return None
    num_sampled = sum(len(s.tokens) for s in rollout.segments if s.logprobs is not None)
    return ScoredRollout(
        rollout, NO_VERDICT_YET, num_sampled, {}, 0.0, is_repetitive=progress.is_repetitive
    )


def is_unfinished(generation: Generation) -> bool:
    """Return True for the sampled part of an open response."""
    return generation.finish_reason is FinishReason.ABORT
