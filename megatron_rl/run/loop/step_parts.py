"""The parts of a training step that rank 0 runs without the other ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.run_state import SelectorState
from megatron_rl.contracts.step_plan import StepPlan
from megatron_rl.credit.assign import BatchCredit, Credit
from megatron_rl.planning.step_planner import StepPlanner
from megatron_rl.rollouts.evaluation.evaluation import Evaluation
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.steps_ahead import StepSource


class RolloutSource(StepSource, Protocol):
    """Supplies the scored groups of a step, and keeps its place among the prompts."""

    def sample(self, step: int) -> RolloutBatch: ...

    def sample_again(
        self, step: int, batch: RolloutBatch, rollout_ids: Sequence[str]
    ) -> RolloutBatch:
        """Replace groups of a batch whose rollouts are gone.

        Raises `TooManyRejected` or `UserClassFailed`.
        """
        ...

    def state(self) -> SelectorState:
        """Return the place among the prompts, before the open step if there is one."""
        ...

    def restore(self, state: SelectorState) -> None: ...

    def inflate_variance(self) -> None: ...


class RolloutHolder(Protocol):
    """Holds the payloads of sampled rollouts until they are released."""

    def release(self, group_ids: Sequence[str]) -> None: ...

    def set_version(self, version: int) -> None: ...

    def refresh(self) -> None:
        """Learn what has changed about engines and collectors, before they get other weights."""
        ...

    def can_sample(self) -> bool:
        """Return False while nothing samples rollouts."""
        ...

    def send_waiting(self) -> None:
        """Send engines all requests that wait for one: nobody sends them while a step trains."""
        ...

    def count_in_flight(self) -> int:
        """Return the number of rollouts to train on that are being sampled or scored."""
        ...

    def engines_idle_seconds(self) -> float:
        """Return the seconds in which engines were idle since the last call."""
        ...

    def stop(self) -> None: ...


@dataclass
class StepParts:
    """The parts of the current step. A phase of a curriculum replaces them.

    evaluation: of the held-out questions. None where nothing is evaluated, as in mode=train_only.
    sets: the evaluations of eval.sets, by name. open_parts: makes the parts of other settings.
    """

    rollouts: RolloutSource
    credit: Credit
    planner: StepPlanner
    evaluation: Evaluation | None
    open_parts: Callable[[Configuration], StepParts]
    sets: Mapping[str, Evaluation] = field(default_factory=dict)

    def plan(self, step: int, credit: BatchCredit) -> StepPlan:
        """Decide which rank trains what."""
        return self.planner.plan(
            step,
            credit.rollouts,
            credit.advantages,
            credit.extra_rollouts,
            credit.denominator_only,
            weights=credit.weights,
        )

    def switch(self, c: Configuration) -> None:
        """Use the parts of other settings, at the same place among the prompts."""
        parts = self.open_parts(c)
        parts.rollouts.restore(self.rollouts.state())
        self.rollouts = parts.rollouts
        self.credit = parts.credit
        self.planner = parts.planner
        self.evaluation = parts.evaluation
        self.sets = parts.sets
