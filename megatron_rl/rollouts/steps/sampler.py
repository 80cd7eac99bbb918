"""Samples the rollouts of training steps through a queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.selection.selector import Selector
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.step_sampling import StepSampling, label_of


class _CannotContinue(Exception):
    """Nothing samples the open requests at the moment."""


@dataclass
class RolloutSampler:
    """Samples the rollouts of steps.

    A step begins with `begin_step`, which does not wait: its rollouts are sampled while this
    process does something else. `finish_step` waits for the rollouts of the oldest open step.

    Only a selector whose choices depend on no rollout may have several open steps. With others, the
    selection of a step begins when the step before has selected all its groups. Choices therefore
    never depend on the time at which groups arrive.

    stop_token_ids: tokens that end a response.
    idle: called regularly while this process waits for rollouts.
    """

    queue: RolloutQueue
    settings: RolloutSettings
    selector: Selector
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]
    _open: dict[int, StepSampling] = field(default_factory=dict, init=False)  # by step, in order
    # By step that is open or has failed: the selector's state before it
    _states_before: dict[int, SelectorState] = field(default_factory=dict, init=False)
    # By step that has failed: the ids under which its groups have to be released
    _failed_ids: dict[int, tuple[str, ...]] = field(default_factory=dict, init=False)
    _sampling: Sampling = field(init=False)  # of all responses
    _num_repeated: int = field(init=False)  # requests that earlier batches repeated
    _num_tokens: int = field(default=0, init=False)  # sampled since the last `count_tokens`

    def __post_init__(self) -> None:
        self._sampling = sampling_of(self.settings, self.stop_token_ids)
        self._num_repeated = self.queue.num_repeated  # of another sampler before this one

    def sample(self, step: int) -> RolloutBatch:
        """Sample and score one batch. Raises `TooManyRejected` or `UserClassFailed`."""
        self.begin_step(step)
        batch = self.finish_step()
        assert batch is not None
        return batch

    @property
    def open_steps(self) -> tuple[int, ...]:
        """The steps that have begun and are not finished, in order."""
        return tuple(self._open)

    def begin_step(self, step: int) -> None:
        """Request the first rollouts of a step.

        Raises ValueError while an earlier step has to be finished first.
        """
        if self._open and not self.selector.ignores_rollouts:
            open_step = self.open_steps[0]
            raise ValueError(f"step {open_step} is open: finish it before step {step}")
        self._states_before[step] = self.selector.state()
        sampling = StepSampling(step, self.selector.select(step))
        self._open[step] = sampling
        self.queue.submit(sampling.register(sampling.selection.first_round(), self._sampling))

    def finish_step(self, can_continue: Callable[[], bool] | None = None) -> RolloutBatch | None:
        """Wait for the rollouts of the oldest open step, and end its selection.

        can_continue: asked regularly. If it returns False, the step stays open, and the result is
        None.

        Raises `TooManyRejected` or `UserClassFailed`.
        """
        sampling = self._open[self.open_steps[0]]
        try:
            self._receive_all(sampling, can_continue)
        except _CannotContinue:
            return None
        batch = self.replace_lost(self._end(sampling))
        self._failed_ids[sampling.step] = batch.delivered_ids
        self.require(sampling.step, batch)
        # Earlier ones too, whose batch could not be used
        for step in self._states_before.keys() - self._open.keys():
            del self._states_before[step]
        self._failed_ids.clear()
        return batch

    def drop_open(self) -> int:
        """Drop the steps that are open or have failed, with their requests.

        Their prompts will be selected again. What a checkpoint had of steps that have not begun is
        dropped, too. Engines abort what they work on. Returns the number of tokens that were
        sampled for all of them, also before the checkpoint.
        """
        num_tokens = self.queue.drop_saved()
        if not self._states_before:
            return num_tokens
        failed_ids = [group_id for ids in self._failed_ids.values() for group_id in ids]
        num_tokens += sum(map(self.queue.tokens_of, failed_ids))
        num_tokens += sum(sampling.generated_tokens for sampling in self._open.values())
        num_tokens += self._abort(
            [id_ for sampling in self._open.values() for id_ in sampling.requested_ids]
        )
        part_ids = [part_id for sampling in self._open.values() for part_id in sampling.parts]
        self.queue.drop([*failed_ids, *part_ids])
        self.selector.restore(self.state())
        self._open.clear()
        self._states_before.clear()
        self._failed_ids.clear()
        return num_tokens

    def count_tokens(self) -> int:
        """Return the tokens that engines have sampled for groups since the last call."""
        num_tokens = self._num_tokens
        self._num_tokens = 0
        return num_tokens

    def open_groups(self, partials: Sequence[Group]) -> dict[int, tuple[Group, ...]]:
        """Return all groups of open steps by step, unfinished ones with their sampled part.

        partials: the sampled parts of unfinished groups.
        """
        return {
            step: self._open_groups(sampling, partials) for step, sampling in self._open.items()
        }

    def _open_groups(self, sampling: StepSampling, partials: Sequence[Group]) -> tuple[Group, ...]:
        lost_ids = set(self.queue.lost_groups(tuple(sampling.parts)))
        groups = {id_: part for id_, part in sampling.parts.items() if id_ not in lost_ids}
        requested_ids = set(sampling.requested_ids)
        for group in (*partials, *self.queue.arrived_groups(requested_ids)):
            if group.group_id in requested_ids:
                groups[group.group_id] = group
        return tuple(groups.values())

    def sample_again(
        self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str]
    ) -> RolloutBatch:
        """Replace the groups of these rollouts, which are gone, and others that are gone too.

        The requests have the same ids and seeds, so deterministic engines that hold the same
        weights give the same groups. Raises `TooManyRejected` or `UserClassFailed`.
        """
        assert batch.sampling is not None
        ids = set(rollout_ids)
        lost_parts = [
            part_id
            for part_id, part in batch.sampling.parts.items()
            if any(rollout.rollout_id in ids for rollout in part.rollouts)
        ]
        if not lost_parts and not self.queue.lost_groups(batch.delivered_ids):
            raise CollectorFailed(
                f"rollouts are gone that no request of the batch has sampled: {sorted(ids)[:4]}"
            )
        new_batch = self.replace_lost(self._repeat(batch, lost_parts))
        self.require(step, new_batch)
        return new_batch

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        """Replace the groups of a finished batch whose rollouts are gone, or in a checkpoint."""
        while lost_parts := self.queue.lost_groups(batch.delivered_ids):
            batch = self._repeat(batch, lost_parts)
        return batch

    def require(self, step: int, batch: RolloutBatch) -> None:
        """Raise `TooManyRejected` or `UserClassFailed` when too many rollouts are unusable."""
        batch.require(label_of(step))

    def state(self) -> SelectorState:
        """Return the selector's state, before the first step that is open or has failed, if any."""
        for state in self._states_before.values():
            return state
        return self.selector.state()

    def restore(self, state: SelectorState) -> None:
        """Restore the selector's state."""
        self.selector.restore(state)

    def inflate_variance(self) -> None:
        """Make the selector's beliefs less certain."""
        self.selector.inflate_variance()

    def _end(self, sampling: StepSampling) -> RolloutBatch:
        """End the selection of a step, and return its batch."""
        del self._open[sampling.step]
        num_repeated = self.queue.num_repeated - self._num_repeated
        self._num_repeated = self.queue.num_repeated
        batch = RolloutBatch(
            groups=(),
            generated_tokens=sampling.generated_tokens,
            engines_left_out=len(self.queue.engines_left_out),
            num_repeated=num_repeated,
            unused_tokens=sampling.unused_tokens,
        )
        return _with_selected(batch, sampling)

    def _receive_all(self, sampling: StepSampling, can_continue: Callable[[], bool] | None) -> None:
        """Receive groups until the selection has enough of them. Raises `_CannotContinue`."""
        while True:
            for part in self._arrivals(sampling, can_continue):
                self._take(sampling, part)
                if sampling.selection.num_needed() is not None:
                    self._drop_surplus(sampling)
                    return
            requests = sampling.selection.next_round()
            if not requests:
                return
            self.queue.submit(sampling.register(requests, self._sampling))

    def _take(self, sampling: StepSampling, part: Group) -> None:
        """Take a part of a group, count its tokens, and request the rest if it is extended."""
        num_tokens = self.queue.tokens_of(part.group_id)
        sampling.generated_tokens += num_tokens
        self._num_tokens += num_tokens - self.queue.saved_tokens_of(part.group_id)
        self.queue.submit(sampling.register(sampling.take(part), self._sampling))

    def _drop_surplus(self, sampling: StepSampling) -> None:
        """Abort the requests that the step does not need, and free what was sampled for them."""
        waiting_ids, delivered_ids = sampling.surplus_ids()
        num_cut = sum(map(self.queue.tokens_of, delivered_ids))
        num_aborted = self._abort(waiting_ids)
        self.queue.drop(delivered_ids)
        sampling.generated_tokens += num_aborted
        sampling.drop((*waiting_ids, *delivered_ids))
        counts = {"surplus_cut": num_cut, "surplus_aborted": num_aborted}
        sampling.unused_tokens = {name: count for name, count in counts.items() if count}

    def _abort(self, part_ids: Sequence[str]) -> int:
        """Abort requests. Returns the tokens that were sampled for them."""
        num_tokens, num_saved = self.queue.abort(part_ids, self.idle)
        self._num_tokens += num_tokens - num_saved
        return num_tokens

    def _arrivals(
        self, sampling: StepSampling, can_continue: Callable[[], bool] | None = None
    ) -> Iterator[Group]:
        """Yield the parts that are requested as they arrive. Raises `_CannotContinue`."""

        def idle() -> None:
            self.idle()
            if can_continue is not None and not can_continue():
                raise _CannotContinue

        return self.queue.as_completed(idle, is_wanted=sampling.is_requested)

    def _repeat(self, batch: RolloutBatch, part_ids: Sequence[str]) -> RolloutBatch:
        """Request parts of groups again and put them into the batch.

        Groups that are still in a checkpoint are read from there, and do not count as repeated.
        Under other weights, the others may differ. The selection extends, uses and weights their
        groups as if they had come like that at first, but requests no further prompts. The tokens
        of the lost ones are in the batch's count already. Engines have sampled both.
        """
        sampling = batch.sampling
        assert sampling is not None
        num_before = sum(map(sampled_tokens, sampling.parts.values()))
        repeated_ids, dropped_ids = sampling.forget(part_ids)
        self.queue.drop(dropped_ids)
        num_repeated = self.queue.request_again(repeated_ids)
        self._num_repeated += num_repeated
        for part in self._arrivals(sampling):
            self._take(sampling, part)
        num_after = sum(map(sampled_tokens, sampling.parts.values()))
        new_batch = replace(
            batch,
            generated_tokens=batch.generated_tokens + num_after - num_before,
            num_repeated=batch.num_repeated + num_repeated,
        )
        return _with_selected(new_batch, sampling)


def _with_selected(batch: RolloutBatch, sampling: StepSampling) -> RolloutBatch:
    """Return the batch with the groups that the selection of its step uses."""
    result = sampling.selection.result()
    return replace(
        batch,
        groups=result.groups,
        stopped_groups=result.stopped_groups,
        surplus_groups=result.surplus_groups,
        delivered_ids=sampling.delivered_ids(result),
        sampling=sampling,
        selection_metrics=sampling.selection.metrics(),
    )


def sampling_of(settings: RolloutSettings, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return how the responses of training steps are sampled."""
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        stop_token_ids=stop_token_ids,
    )
