"""Rollouts that are sampled while the trainer works on an earlier step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from megatron_rl.rollouts.rollout_batch import NonFiniteResponses, RolloutBatch, TooManyRejected


class StepSource(Protocol):
    """Supplies the batches of steps, one after the other."""

    @property
    def open_step(self) -> int | None:
        """The step that has begun and is not finished, if any."""
        ...

    def begin_step(self, step: int) -> None:
        """Request the first rollouts of a step, without waiting for them."""
        ...

    def finish_step(self, can_continue: Callable[[], bool] | None = None) -> RolloutBatch | None:
        """Wait for the batch of the open step. Returns None once `can_continue` returns False."""
        ...

    def settle(self) -> None:
        """Count the last step as sampled, although its batch cannot be used."""
        ...

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        """Replace the groups of a finished batch whose rollouts are gone."""
        ...


class StepsAhead:
    """The batches that are sampled before their step is trained. Rank 0 only.

    The next step begins once the step before is sampled whole, and its rollouts are sampled while
    that one trains. All of them must be there before the engines get other weights: each rollout
    has one version, and no choice depends on a clock. More than one step ahead would therefore
    only make rollouts older.

    max_staleness: 0 samples nothing ahead.
    """

    def __init__(self, max_staleness: int = 0) -> None:
        self._max_staleness = max_staleness
        self._batches: dict[int, RolloutBatch] = {}  # by step
        self._failure: TooManyRejected | None = None  # of the step after the last one taken
        self._num_uncounted_tokens = 0

    @property
    def max_staleness(self) -> int:
        """The largest number of steps that a batch is sampled ahead."""
        return self._max_staleness

    @property
    def is_used(self) -> bool:
        """True if rollouts may be sampled ahead."""
        return self._max_staleness > 0

    @property
    def batches(self) -> Mapping[int, RolloutBatch]:
        """The batches that are sampled and not trained, by step."""
        return MappingProxyType(self._batches)

    def restore(self, batches: Mapping[int, RolloutBatch]) -> None:
        """Continue with the batches of a checkpoint."""
        self._batches = dict(batches)

    def take(self, step: int, source: StepSource) -> RolloutBatch:
        """Return the batch of a step, which is sampled now if it was not before.

        Raises `TooManyRejected`, also for a batch that was sampled ahead.
        """
        batch = self._batches.pop(step, None)
        if batch is not None:
            return source.replace_lost(batch)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if source.open_step is None:
            source.begin_step(step)
        batch = source.finish_step()
        assert batch is not None
        self._num_uncounted_tokens += batch.generated_tokens
        return batch

    def begin_next(self, step: int, last_step: int, source: StepSource) -> None:
        """Let the rollouts of the next step be sampled while `step` trains.

        last_step: rollouts of later steps are not sampled.
        """
        next_step = step + 1
        is_sampled = next_step in self._batches
        if self._max_staleness and next_step <= last_step and not is_sampled:
            source.begin_step(next_step)

    def complete(self, source: StepSource, can_continue: Callable[[], bool] | None = None) -> None:
        """Wait for the rollouts of the step that has begun, if one has.

        can_continue: the wait ends without them once it returns False.

        A batch that cannot be used is an error of its own step: `take` raises it.
        """
        step = source.open_step
        if step is None:
            return
        try:
            batch = source.finish_step(can_continue)
        except TooManyRejected as failure:
            self._failure = failure
            return
        if batch is not None:
            self._num_uncounted_tokens += batch.generated_tokens
            self._batches[step] = batch

    def replace_lost(self, source: StepSource) -> None:
        """Replace groups whose rollouts are gone. Their engines may have other weights now."""
        self._batches = {step: source.replace_lost(batch) for step, batch in self._batches.items()}

    def drop(self) -> tuple[list[str], int]:
        """Drop all batches. Returns the ids of their groups, and their number of tokens."""
        batches = list(self._batches.values())
        if isinstance(self._failure, NonFiniteResponses):
            batches.append(self._failure.batch)
        self._failure = None
        group_ids = [group_id for batch in batches for group_id in batch.delivered_ids]
        num_tokens = sum(batch.generated_tokens for batch in batches)
        self._batches = {}
        return group_ids, num_tokens

    def count_tokens(self) -> int:
        """Return the tokens of the batches that were sampled since the last call."""
        num_tokens = self._num_uncounted_tokens
        self._num_uncounted_tokens = 0
        return num_tokens
