"""The rollouts of each step, and of later steps, as rank 0's loop asks for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.engines.fleet import NoEngineLeft
from megatron_rl.engines.on_update import OnUpdate
from megatron_rl.records.stopwatch import Stopwatch
from megatron_rl.rollouts.queue import CollectorFailed, HoldTimedOut
from megatron_rl.rollouts.recording.recorded_rollouts import BadRecording
from megatron_rl.rollouts.steps.rollout_batch import (
    NonFiniteResponses,
    RolloutBatch,
    TooManyRejected,
)
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead
from megatron_rl.rollouts.wire.rejections import UserClassFailed
from megatron_rl.run.checkpoints.manager import CheckpointManager
from megatron_rl.run.features.observer import Observers
from megatron_rl.run.loop.engine_weights import EngineWeights
from megatron_rl.run.loop.step_parts import RolloutHolder, StepParts
from megatron_rl.run.supervision.stop_request import WaitAborted

# Open rollouts cannot be stored. The rest of a checkpoint can be saved.
STORE_FAILURES = (CollectorFailed, NoEngineLeft, HoldTimedOut)
# With these, all ranks are alive and wait for a command
ROLLOUT_FAILURES = (TooManyRejected, UserClassFailed, BadRecording, *STORE_FAILURES)


class Sampling:
    """Samples the batch of each step, and lets engines work on later steps meanwhile.

    steps_ahead: the batches that are sampled before their step. on_update: what happens to open
    responses when the engines get other weights. holder: holds the payloads of rollouts.
    """

    def __init__(
        self,
        parts: StepParts,
        holder: RolloutHolder,
        weights: EngineWeights,
        *,
        steps_ahead: StepsAhead,
        on_update: OnUpdate,
        checkpoints: CheckpointManager,
        observers: Observers,
        total_steps: int,
    ) -> None:
        self._parts = parts
        self._holder = holder
        self._weights = weights
        self._steps_ahead = steps_ahead
        self._on_update = on_update
        self._checkpoints = checkpoints
        self._observers = observers
        self._total_steps = total_steps
        self._num_in_flight = 0  # rollouts of later steps when the step had its own

    @property
    def train_version(self) -> int | None:
        """The version of the trainer's weights, to tell ages; None if all rollouts are new."""
        return self._version if self._steps_ahead.is_used else None

    def sample(self, step: int, watch: Stopwatch) -> RolloutBatch:
        """Return the batch of a step, once it is sampled. Engines then leave their devices.

        Before and after the wait, it begins the steps that may be sampled with the present weights.
        """
        source = self._parts.rollouts
        last_step = self._last_step(step)
        with watch.section("rollout"), self._checkpoints.abortable_wait():
            self._steps_ahead.begin_open(step, last_step, source)
            with self._bad_responses_observed(step):
                batch = self._steps_ahead.take(step, source)
            self._steps_ahead.begin_next(step, last_step, source)
            if self._steps_ahead.is_used:
                self._holder.send_waiting()
                self._num_in_flight = self._holder.count_in_flight()
        self._weights.sleep(watch)
        return batch

    def sample_again(
        self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str], watch: Stopwatch
    ) -> RolloutBatch:
        """Replace groups of a batch whose rollouts are gone."""
        with watch.section("rollout"), self._checkpoints.abortable_wait():
            self._weights.send_again()
            with self._bad_responses_observed(step):
                batch = self._parts.rollouts.sample_again(step, batch, rollout_ids)
            self._holder.send_waiting()
        self._weights.sleep(watch)
        return batch

    def pause(self, watch: Stopwatch) -> tuple[int, Failure | WaitAborted | None]:
        """Let no engine work. Returns the tokens that were sampled since the last call.

        A failure is returned, too, to be raised once the step has its metrics.
        """
        try:
            with self._later_rollouts(watch):
                return self._on_update.before_sync(self._parts.rollouts), None
        except (*ROLLOUT_FAILURES, WaitAborted) as failure:
            if self._on_update.is_quiet:
                self._observers.keep_tokens(self._parts.rollouts.count_tokens())
            return 0, failure

    def resume(self, watch: Stopwatch) -> None:
        """Let engines work on what is open, with their new weights."""
        with self._later_rollouts(watch):
            self._on_update.after_sync(self._parts.rollouts)

    def count_evaluation(self, num_tokens: int, values: dict[str, float]) -> None:
        """Let observers count the tokens of an evaluation, if no engine works after it."""
        if self._on_update.is_quiet:
            num_tokens += self._parts.rollouts.count_tokens()
            self._observers.after_quiet(num_tokens, values)

    def metrics(self, batch: RolloutBatch) -> dict[str, float]:
        """Return metrics of sampling ahead.

        Raises RuntimeError for an age above `rollout.max_staleness`.
        """
        if not self._steps_ahead.is_used:
            return {}
        metrics = batch.age_metrics(self._version)
        age = metrics.get("rollout/age/max", 0.0)
        if age > self._steps_ahead.max_staleness:
            raise RuntimeError(
                f"rollouts of age {age:g} were trained, and the bound is "
                f"rollout.max_staleness={self._steps_ahead.max_staleness}: please report it"
            )
        metrics["rollout/in_flight"] = float(self._num_in_flight)
        metrics["time/engines_idle"] = self._holder.engines_idle_seconds()
        return metrics

    def release(self, batch: RolloutBatch) -> None:
        """Free the rollouts of a batch."""
        self._holder.release(batch.delivered_ids)

    def drop(self) -> dict[str, float]:
        """Drop rollouts that no step will train. Returns metrics."""
        if not self._steps_ahead.is_used:
            return {}
        group_ids, num_tokens = self._steps_ahead.drop(self._parts.rollouts)
        self._holder.release(group_ids)
        return {"account/unfinished": float(num_tokens)}

    def is_under_way(self, step: int) -> bool:
        """Return True for a step whose rollouts were requested, here or before the checkpoint."""
        return self._steps_ahead.is_under_way(step, self._parts.rollouts)

    def begin_saved_steps(self, step: int) -> None:
        """Begin the steps that were open in the checkpoint, if the run has to stop.

        The next checkpoint then holds them. step: the first one that is not trained.
        """
        if self._checkpoints.stop_requested and self.is_under_way(step):
            self._steps_ahead.begin_open(step, self._last_step(step), self._parts.rollouts)

    def stop(self) -> None:
        """End the processes that sample."""
        self._holder.stop()

    @property
    def num_uncounted(self) -> int:
        """The known number of sampled tokens that the next `pause` will count."""
        return self._on_update.num_uncounted

    def place(self) -> SelectorState:
        """Return the place among the prompts before the first step that is open or has failed."""
        return self._steps_ahead.place(self._parts.rollouts)

    def place_before(self, step: int) -> SelectorState | None:
        """Return the place among the prompts before a step with a batch, if it is known."""
        return self._steps_ahead.state_before(step)

    def batches_after(self, step: int) -> dict[int, RolloutBatch]:
        """Return the batches of the next steps, up to one that is open or has failed."""
        return self._steps_ahead.batches_after(step)

    def before_save(self) -> Mapping[int, tuple[Group, ...]]:
        """Return the sampled parts of open groups, by step. Raises `STORE_FAILURES`."""
        return self._on_update.before_save(self._parts.rollouts, self._checkpoints.seconds_to_stop)

    def after_save(self) -> None:
        """Free what `before_save` has stored."""
        self._on_update.after_save()

    def restore(self, place: SelectorState) -> None:
        """Go to a place among the prompts."""
        self._parts.rollouts.restore(place)

    @property
    def _version(self) -> int:
        """The version of the weights that the trainer has at the start of a step."""
        return self._weights.version or 0

    def _last_step(self, step: int) -> int:
        """The last step whose rollouts may be sampled while `step` trains."""
        return min(self._total_steps, self._observers.last_step(step))

    @contextlib.contextmanager
    def _bad_responses_observed(self, step: int) -> Iterator[None]:
        """Let observers judge a batch whose responses are NaN."""
        try:
            yield
        except NonFiniteResponses as failure:
            # The engines may have had the weights of an earlier step
            first_step = step - self._steps_ahead.max_staleness
            self._observers.after_bad_responses(first_step, failure)
            raise

    @contextlib.contextmanager
    def _later_rollouts(self, watch: Stopwatch) -> Iterator[None]:
        """Wait for the rollouts of later steps. A stop request may abort it."""
        is_measured = self._steps_ahead.is_used
        section = watch.section("next_rollouts") if is_measured else contextlib.nullcontext()
        with section, self._checkpoints.abortable_wait():
            yield
