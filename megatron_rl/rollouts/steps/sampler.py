"""Samples the rollouts of training steps through a queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group, sampled_tokens
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.selection.selector import RolloutRequest, Selector
from megatron_rl.rollouts.messages import GroupRequest, VersionBudget
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.step_sampling import StepSampling, label_of


class _CannotContinue(Exception):
    """Nothing samples the open requests at the moment."""


@dataclass
class RolloutSampler:
    """Samples the rollouts of steps.

    A step begins with `begin_step`, which does not wait: its rollouts are sampled while this
    process does something else. `finish_step` waits for those of the oldest open step.

    Only a selector whose choices depend on no rollout may have several open steps. With others, the
    selection of a step begins after that of the step before has ended. Choices therefore never
    depend on the time at which groups arrive.

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
    _num_repeated: int = field(init=False)  # requests that earlier batches repeated
    _num_tokens: int = field(default=0, init=False)  # sampled since the last `count_tokens`

    def __post_init__(self) -> None:
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

    def begin_step(self, step: int, budget: VersionBudget | None = None) -> None:
        """Request the first rollouts of a step.

        budget: of each response. Raises ValueError while an earlier step has to be finished first.
        """
        if self._open and not self.selector.ignores_rollouts:
            open_step = self.open_steps[0]
            raise ValueError(f"step {open_step} is open: finish it before step {step}")
        self._states_before[step] = self.selector.state()
        sampling = StepSampling(step, self.selector.select(step), budget)
        self._open[step] = sampling
        self._submit(sampling, sampling.selection.first_round())

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
        batch = self._without_lost_groups(self._end(sampling))
        self._failed_ids[sampling.step] = batch.delivered_ids
        batch.require(sampling.label, self.settings.max_rejected_share)
        self.settle()
        return batch

    def settle(self) -> None:
        """Count the steps that have ended as sampled, also those whose batch cannot be used."""
        for step in self._states_before.keys() - self._open.keys():
            del self._states_before[step]
        self._failed_ids.clear()

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
        self.queue.withdraw([*failed_ids, *part_ids])
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
        """Return what there is of all groups of open steps, finished or not, by step.

        partials: what there is of those that are not finished.
        """
        return {
            step: self._open_groups(sampling, partials) for step, sampling in self._open.items()
        }

    def _open_groups(self, sampling: StepSampling, partials: Sequence[Group]) -> tuple[Group, ...]:
        lost_ids = set(self.queue.lost_groups(tuple(sampling.parts)))
        groups = {id_: part for id_, part in sampling.parts.items() if id_ not in lost_ids}
        for group in (*partials, *self.queue.arrived_groups(sampling.requested_ids)):
            if group.group_id in sampling.requested_ids:
                groups[group.group_id] = group
        return tuple(groups.values())

    def lift_budgets(self) -> None:
        """Let the responses of all open steps be sampled to their end."""
        self.queue.lift_budgets()

    def sample_again(
        self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str]
    ) -> RolloutBatch:
        """Replace the groups of these rollouts, which are gone, and others that are gone too.

        The requests have the same ids and seeds, so deterministic engines that hold the same
        weights give the same groups. Raises `TooManyRejected` or `UserClassFailed`.
        """
        ids = set(rollout_ids)
        lost_parts = [
            part_id
            for part_id, part in batch.parts.items()
            if any(rollout.rollout_id in ids for rollout in part.rollouts)
        ]
        if not lost_parts and not self.queue.lost_groups(batch.delivered_ids):
            raise CollectorFailed(
                f"rollouts are gone that no request of the batch has sampled: {sorted(ids)[:4]}"
            )
        return self._require_repeated(step, batch, self._repeat(batch, lost_parts))

    def replace_lost(self, step: int, batch: RolloutBatch) -> RolloutBatch:
        """Replace the groups of a finished batch whose rollouts are gone, or in a checkpoint.

        Raises `TooManyRejected` or `UserClassFailed`.
        """
        return self._require_repeated(step, batch, batch)

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
        selection = sampling.selection
        result = selection.result()
        num_repeated = self.queue.num_repeated - self._num_repeated
        self._num_repeated = self.queue.num_repeated
        return RolloutBatch(
            groups=result.groups,
            stopped_groups=result.stopped_groups,
            surplus_groups=result.surplus_groups,
            generated_tokens=sampling.generated_tokens,
            engines_left_out=len(self.queue.engines_left_out),
            delivered_ids=sampling.delivered_ids(result),
            parts=sampling.parts,
            num_repeated=num_repeated,
            selection_metrics=selection.metrics(),
            unused_tokens=sampling.unused_tokens,
        )

    def _receive_all(self, sampling: StepSampling, can_continue: Callable[[], bool] | None) -> None:
        """Receive groups until the selection has enough of them. Raises `_CannotContinue`."""
        while True:
            for part in self._arrivals(sampling.requested_ids, can_continue):
                num_tokens = self.queue.tokens_of(part.group_id)
                sampling.generated_tokens += num_tokens
                self._num_tokens += num_tokens - self.queue.saved_tokens_of(part.group_id)
                self._submit(sampling, sampling.take(part))
                if sampling.selection.num_needed() is not None:
                    self._drop_surplus(sampling)
                    return
            requests = sampling.selection.next_round()
            if not requests:
                return
            self._submit(sampling, requests)

    def _drop_surplus(self, sampling: StepSampling) -> None:
        """Abort the requests that the step does not need, and free what was sampled for them."""
        waiting_ids, delivered_ids = sampling.surplus_ids()
        num_cut = sum(map(self.queue.tokens_of, delivered_ids))
        num_aborted = self._abort(waiting_ids)
        self.queue.withdraw(delivered_ids)
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
        self, ids: Collection[str], can_continue: Callable[[], bool] | None = None
    ) -> Iterator[Group]:
        """Yield the parts with these ids as they arrive. Raises `_CannotContinue`."""

        def idle() -> None:
            self.idle()
            if can_continue is not None and not can_continue():
                raise _CannotContinue

        return self.queue.as_completed(idle, is_wanted=ids.__contains__)

    def _without_lost_groups(self, batch: RolloutBatch) -> RolloutBatch:
        while lost_parts := self.queue.lost_groups(batch.delivered_ids):
            batch = self._repeat(batch, lost_parts)
        return batch

    def _require_repeated(
        self, step: int, old_batch: RolloutBatch, batch: RolloutBatch
    ) -> RolloutBatch:
        """Return a batch without lost groups. Raises what `RolloutBatch.require` does.

        old_batch: was usable. Groups that are read from a checkpoint are those of that batch.
        """
        batch = self._without_lost_groups(batch)
        if batch.num_repeated > old_batch.num_repeated:
            batch.require(label_of(step), self.settings.max_rejected_share)
        return batch

    def _repeat(self, batch: RolloutBatch, part_ids: Sequence[str]) -> RolloutBatch:
        """Request parts of groups again and put them into the batch.

        Those that are still in a checkpoint are read from there, and do not count as repeated. The
        tokens of the lost ones are in the batch's count already. Under other weights, the new
        ones may be more or less. Engines have sampled both.
        """
        num_repeated = self.queue.request_again(part_ids)
        new_parts = {part.group_id: part for part in self._arrivals(set(part_ids))}
        self._num_repeated += num_repeated
        num_new = sum(map(sampled_tokens, new_parts.values()))
        num_lost = sum(sampled_tokens(batch.parts[part_id]) for part_id in part_ids)
        self._num_tokens += sum(
            self.queue.tokens_of(part_id) - self.queue.saved_tokens_of(part_id)
            for part_id in part_ids
        )
        new_batch = batch.with_parts(new_parts, num_repeated=num_repeated)
        return replace(new_batch, generated_tokens=batch.generated_tokens + num_new - num_lost)

    def _submit(self, sampling: StepSampling, requests: Sequence[RolloutRequest]) -> None:
        parameters = sampling_of(self.settings, self.stop_token_ids)
        self.queue.submit(
            [
                GroupRequest(
                    group_id=part_id,
                    prompt=request.prompt,
                    num_samples=request.samples,
                    first_sample=request.first_sample,
                    sampling=parameters,
                    budget=sampling.budget,
                    extension=request.extension,
                )
                for part_id, request in sampling.register(requests).items()
            ]
        )


def sampling_of(settings: RolloutSettings, stop_token_ids: tuple[int, ...]) -> Sampling:
    """Return how the responses of training steps are sampled."""
    return Sampling(
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        stop_token_ids=stop_token_ids,
    )
