"""Rollouts that are sampled while the trainer works on an earlier step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch, TooManyRejected
from megatron_rl.rollouts.wire.rejections import UserClassFailed

SecondsToStop = Callable[[], float | None]
"""Returns the time in which a run that was asked to stop has to end, infinity without a limit.

None: the run was not asked to stop.
"""


class StepSource(Protocol):
    """Supplies the batches of steps, one after the other."""

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The steps that have begun and are not finished, in order."""
        ...

    def begin_step(self, step: int) -> None:
        """Request the first rollouts of a step, without waiting for them."""
        ...

    def finish_step(self, can_continue: Callable[[], bool] | None = None) -> RolloutBatch | None:
        """Wait for the batch of the oldest open step. None once `can_continue` returns False."""
        ...

    def drop_open(self) -> int:
        """Drop the steps that are open or have failed. Returns their tokens that have arrived."""
        ...

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        """Replace the groups of a finished batch whose rollouts are gone, or in a checkpoint."""
        ...

    def require(self, step: int, batch: RolloutBatch) -> None:
        """Raise `TooManyRejected` or `UserClassFailed` when too many rollouts are unusable."""
        ...

    def count_tokens(self) -> int:
        """Return the tokens that were sampled since the last call."""
        ...

    def open_groups(self, partials: Sequence[Group]) -> dict[int, tuple[Group, ...]]:
        """Return all groups of open steps by step, unfinished ones with their sampled part.

        partials: the sampled parts of unfinished groups.
        """
        ...

    def restore(self, state: SelectorState) -> None:
        """Go to a place among the prompts."""
        ...

    def state(self) -> SelectorState:
        """Return the place among the prompts, before the first step that is open or has failed."""
        ...


def largest_age(max_staleness: int, *, continues_responses: bool) -> int:
    """Return the largest age that a token can have when a step trains on it, in weight versions.

    If responses end before a sync, at most one step is sampled ahead.
    """
    return max_staleness if continues_responses else min(1, max_staleness)


class StepsAhead:
    """The batches that are sampled before their step is trained. Rank 0 only.

    A step t begins before step t - max_staleness trains, at the earliest. The weights that train on
    a token have therefore at most `max_staleness` versions more than the weights that sampled it.
    Steps are taken whole and in order.

    max_staleness: 0 samples nothing ahead.
    continues_responses: responses go on under new weights, so that any number of steps may be open.
    If not, a step begins once the one before is sampled whole, and is sampled whole before the
    engines get other weights. More than one step ahead would then only make rollouts older.
    """

    def __init__(self, max_staleness: int = 0, *, continues_responses: bool = False) -> None:
        self._max_staleness = max_staleness
        self._continues_responses = continues_responses
        self._batches: dict[int, RolloutBatch] = {}  # by step
        # By step with a batch: the place among the prompts before it, if it is known
        self._states_before: dict[int, SelectorState] = {}
        self._failures: dict[int, Failure] = {}  # by step
        self._saved_steps: frozenset[int] = frozenset()  # steps that were open in a checkpoint

    @property
    def max_staleness(self) -> int:
        """The largest number of steps that a batch is sampled ahead."""
        return largest_age(self._max_staleness, continues_responses=self._continues_responses)

    @property
    def is_used(self) -> bool:
        """True if rollouts may be sampled ahead."""
        return self._max_staleness > 0

    @property
    def batches(self) -> Mapping[int, RolloutBatch]:
        """The batches that are sampled and not trained, by step."""
        return MappingProxyType(self._batches)

    def batches_after(self, step: int) -> dict[int, RolloutBatch]:
        """Return the batches of the next steps, up to one that is open or has failed."""
        batches: dict[int, RolloutBatch] = {}
        while step + 1 in self._batches and step + 1 not in self._failures:
            step += 1
            batches[step] = self._batches[step]
        return batches

    def state_before(self, step: int) -> SelectorState | None:
        """Return the place among the prompts before a step with a batch, if it is known."""
        return self._states_before.get(step)

    def place(self, source: StepSource) -> SelectorState:
        """Return the place among the prompts before the first step that is open or has failed."""
        failed_steps = self._failures.keys() & self._states_before.keys()
        return self._states_before[min(failed_steps)] if failed_steps else source.state()

    def restore(
        self,
        batches: Mapping[int, RolloutBatch],
        open_steps: Collection[int] = (),
        last_step: int = sys.maxsize,
    ) -> None:
        """Continue with the batches of a checkpoint. Their rollouts are there until `take`.

        open_steps: steps that were open there. last_step: of the run, no later one is sampled.
        """
        self._batches = dict(batches)
        self._saved_steps = frozenset(step for step in open_steps if step <= last_step)

    def has_begun(self, step: int, source: StepSource) -> bool:
        """Return True for a step whose rollouts were requested already."""
        return step in self._batches or step in self._failures or step in source.open_steps

    def is_under_way(self, step: int, source: StepSource) -> bool:
        """Return True for a step that has begun, here or before the checkpoint."""
        return self.has_begun(step, source) or step in self._saved_steps

    def begin_open(self, step: int, last_step: int, source: StepSource) -> None:
        """Begin the steps that may be sampled with the present weights, before `step` is taken.

        last_step: rollouts of later steps are not sampled, unless these were open in the
        checkpoint.
        """
        if not self._continues_responses:
            return
        for ahead_step in range(step, step + self._max_staleness + 1):
            is_sampled = ahead_step <= last_step or ahead_step in self._saved_steps
            if is_sampled and not self.has_begun(ahead_step, source):
                source.begin_step(ahead_step)

    def take(self, step: int, source: StepSource) -> RolloutBatch:
        """Return the batch of a step, which is sampled now if it was not before.

        Raises what prevents it, such as `TooManyRejected`, also for a batch that was sampled ahead.
        """
        self._states_before.pop(step, None)
        # Also in later steps: groups of a checkpoint are read before it may be removed
        self._replace_lost(source)
        batch = self._batches.pop(step, None)
        if step in self._failures:
            raise self._failures.pop(step)
        if batch is not None:
            return batch
        if step not in source.open_steps:
            source.begin_step(step)
        batch = source.finish_step()
        assert batch is not None
        return batch

    def begin_next(self, step: int, last_step: int, source: StepSource) -> None:
        """Begin the next step, after `step` was taken. Its rollouts are sampled while that trains.

        last_step: rollouts of later steps are not sampled.
        """
        if not self._max_staleness or self._continues_responses or step >= last_step:
            return
        if not self.has_begun(step + 1, source):
            source.begin_step(step + 1)

    def complete(self, source: StepSource, can_continue: Callable[[], bool] | None = None) -> None:
        """Wait for the rollouts of all steps that have begun.

        can_continue: the wait ends without them once it returns False.

        A step that cannot be sampled is an error of its own: `take` raises it. Those after it stay
        open, because a run that resumes before it selects their prompts again.
        """
        while source.open_steps and not self._failures:
            step = source.open_steps[0]
            state = source.state()
            try:
                batch = source.finish_step(can_continue)
            except Failure as failure:
                self._failures[step] = failure
                return
            if batch is None:
                return
            self._batches[step] = batch
            self._states_before[step] = state

    def complete_for_save(self, source: StepSource, seconds_to_stop: SecondsToStop) -> None:
        """Wait for the rollouts of all steps that have begun, so that a checkpoint holds them.

        It ends once the run is asked to stop. The steps that are open then are not saved.
        """
        if seconds_to_stop() is not None:
            return
        self.complete(source, lambda: seconds_to_stop() is None)
        if seconds_to_stop() is not None:
            return
        self._replace_lost(source)

    def _replace_lost(self, source: StepSource) -> None:
        """Replace lost groups of all batches. A batch that cannot be used fails its own step."""
        for step in sorted(self._batches.keys() - self._failures.keys()):
            old_batch = self._batches[step]
            # Also a batch that cannot be used: `drop` releases its groups
            batch = self._batches[step] = source.replace_lost(old_batch)
            if batch.num_repeated == old_batch.num_repeated:
                continue  # no group was sampled anew, so the batch is as usable as before
            try:
                source.require(step, batch)
            except (TooManyRejected, UserClassFailed) as failure:
                self._failures[step] = failure

    def drop(self, source: StepSource) -> tuple[list[str], int]:
        """Drop all batches and open steps. Their prompts are selected again.

        Prompts of batches from a checkpoint are not, because their place is unknown.

        Returns the ids of the batches' groups, and the number of tokens that were sampled for all.
        """
        group_ids = [id_ for batch in self._batches.values() for id_ in batch.delivered_ids]
        num_tokens = sum(batch.generated_tokens for batch in self._batches.values())
        num_tokens += source.drop_open()
        if self._states_before:
            source.restore(self._states_before[min(self._states_before)])
        self._batches = {}
        self._states_before = {}
        self._failures = {}
        self._saved_steps = frozenset()
        return group_ids, num_tokens
