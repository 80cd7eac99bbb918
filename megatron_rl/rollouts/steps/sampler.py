"""Samples the rollouts of training steps through a queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.prompts.selection.selector import RolloutRequest, Selector
from megatron_rl.rollouts.messages import GroupRequest
from megatron_rl.rollouts.queue import CollectorFailed, RolloutQueue
from megatron_rl.rollouts.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.step_sampling import StepSampling


class _CannotContinue(Exception):
    """Nothing samples the open requests at the moment."""


@dataclass
class RolloutSampler:
    """Samples the rollouts of one step at a time.

    A step begins with `begin_step`, which does not wait: its rollouts are sampled while this
    process does something else. `finish_step` waits for them.

    The selection of a step begins after that of the step before has ended. Its choices therefore
    do not depend on the time at which groups arrive.

    stop_token_ids: tokens that end a response.
    idle: called regularly while this process waits for rollouts.
    """

    queue: RolloutQueue
    settings: RolloutSettings
    selector: Selector
    stop_token_ids: tuple[int, ...]
    idle: Callable[[], None]
    _sampling: StepSampling | None = field(default=None, init=False)
    _state_before: SelectorState | None = field(default=None, init=False)
    _num_repeated: int = field(default=0, init=False)  # requests that earlier batches repeated

    def sample(self, step: int) -> RolloutBatch:
        """Sample and score one batch. Raises `TooManyRejected` or `UserClassFailed`."""
        self.begin_step(step)
        batch = self.finish_step()
        assert batch is not None
        return batch

    def begin_step(self, step: int) -> None:
        """Request the first rollouts of a step. Raises ValueError while another step is open."""
        if self._sampling is not None:
            raise ValueError(f"step {self._sampling.step} is open: finish it before step {step}")
        self._state_before = self.selector.state()
        self._sampling = StepSampling(step, self.selector.select(step))
        self._submit(self._sampling, self._sampling.selection.first_round())

    @property
    def open_step(self) -> int | None:
        """The step that has begun and is not finished, if any."""
        return None if self._sampling is None else self._sampling.step

    def finish_step(self, can_continue: Callable[[], bool] | None = None) -> RolloutBatch | None:
        """Wait for the rollouts of the open step, and end its selection.

        can_continue: asked regularly. If it returns False, the step stays open, and the result is
        None.

        Raises `TooManyRejected` or `UserClassFailed`.
        """
        sampling = self._sampling
        assert sampling is not None
        try:
            self._receive_all(sampling, can_continue)
        except _CannotContinue:
            return None
        batch = self._without_lost_groups(self._end(sampling))
        batch.require(sampling.label, self.settings.max_rejected_share)
        self.settle()
        return batch

    def settle(self) -> None:
        """Count the last step as sampled, although its batch cannot be used."""
        self._state_before = None

    def sample_again(self, batch: RolloutBatch, rollout_ids: Sequence[str]) -> RolloutBatch:
        """Replace the groups of these rollouts, which are gone, and others that are gone too.

        The requests have the same ids and seeds, so deterministic engines that hold the same
        weights give the same groups.
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
        return self._without_lost_groups(self._repeat(batch, lost_parts))

    def replace_lost(self, batch: RolloutBatch) -> RolloutBatch:
        """Replace the groups of a finished batch whose rollouts are gone."""
        return self._without_lost_groups(batch)

    def state(self) -> SelectorState:
        """Return the selector's state, before the step that is open or has failed, if any."""
        return self._state_before or self.selector.state()

    def restore(self, state: SelectorState) -> None:
        """Restore the selector's state."""
        self.selector.restore(state)

    def inflate_variance(self) -> None:
        """Make the selector's beliefs less certain."""
        self.selector.inflate_variance()

    def _end(self, sampling: StepSampling) -> RolloutBatch:
        """End the selection of a step, and return its batch."""
        self._sampling = None
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
        )

    def _receive_all(self, sampling: StepSampling, can_continue: Callable[[], bool] | None) -> None:
        """Receive groups until the selection has enough of them. Raises `_CannotContinue`."""
        while True:
            for part in self._arrivals(can_continue):
                self._take(sampling, part)
            requests = sampling.selection.next_round()
            if not requests:
                return
            self._submit(sampling, requests)

    def _arrivals(self, can_continue: Callable[[], bool] | None) -> Iterator[Group]:
        """Yield parts as they arrive, until none is outstanding. Raises `_CannotContinue`."""

        def idle() -> None:
            self.idle()
            if can_continue is not None and not can_continue():
                raise _CannotContinue

        return self.queue.as_completed(idle)

    def _take(self, sampling: StepSampling, part: Group) -> None:
        """Take a part of the open step, and request its extension if it needs one."""
        sampling.generated_tokens += self.queue.tokens_of(part.group_id)
        self._submit(sampling, sampling.take(part))

    def _without_lost_groups(self, batch: RolloutBatch) -> RolloutBatch:
        while lost_parts := self.queue.lost_groups(batch.delivered_ids):
            batch = self._repeat(batch, lost_parts)
        return batch

    def _repeat(self, batch: RolloutBatch, part_ids: Sequence[str]) -> RolloutBatch:
        """Request parts of groups again and put them into the batch.

        The tokens of the lost ones are in the batch's count already.
        """
        self.queue.request_again(part_ids)
        missing_ids = set(part_ids)
        new_parts: dict[str, Group] = {}
        for part in self._arrivals(None):
            if part.group_id in missing_ids:
                new_parts[part.group_id] = part
                missing_ids.remove(part.group_id)
            elif self._sampling is not None:
                self._take(self._sampling, part)
            if not missing_ids:
                break
        self._num_repeated += len(part_ids)
        return batch.with_parts(new_parts, num_repeated=len(part_ids))

    def _submit(self, sampling: StepSampling, requests: Sequence[RolloutRequest]) -> None:
        sampling_parameters = Sampling(
            max_new_tokens=self.settings.max_new_tokens,
            temperature=self.settings.temperature,
            stop_token_ids=self.stop_token_ids,
        )
        self.queue.submit(
            [
                GroupRequest(
                    group_id=part_id,
                    prompt=request.prompt,
                    num_samples=request.samples,
                    first_sample=request.first_sample,
                    sampling=sampling_parameters,
                )
                for part_id, request in sampling.register(requests).items()
            ]
        )
