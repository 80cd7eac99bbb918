"""The phases of a run, one after another: when one ends, and what the next one changes.

See docs/curriculum.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import msgspec

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.curriculum import Phase, PhaseEnd
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import EnterPhase
from megatron_rl.contracts.run_state import PhaseState
from megatron_rl.losses import open_loss
from megatron_rl.run.step_parts import StepParts
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.worker import Worker


class PhaseSchedule:
    """Decides which phase a step belongs to.

    The decision depends on `state` alone, so that a resumed run enters the same phases at the same
    steps (tests/run/test_curriculum.py).

    ends: the limits of each phase, None for one that lasts to the end of the run.
    """

    def __init__(self, ends: Sequence[PhaseEnd | None]) -> None:
        self._ends = ends
        self.state = PhaseState()

    def update(self, tokens: int, accuracy: float | None) -> None:
        """Add a step: the tokens sampled for it, and the accuracy if it was evaluated.

        An accuracy that ends the phase is not replaced: steps that were sampled ahead follow it.
        """
        latest = self.state.accuracy
        if accuracy is not None and not self._has_reached_accuracy():
            latest = accuracy
        total = self.state.tokens + tokens
        self.state = msgspec.structs.replace(self.state, tokens=total, accuracy=latest)

    def ending_reason(self, step: int) -> str:
        """Return why the current phase does not include `step`, or an empty string."""
        state = self.state
        end = self._ends[state.index]
        if end is None:
            return ""
        if end.steps is not None and step > end.steps:
            return f"until.steps={end.steps}"
        if end.tokens is not None and state.tokens >= end.tokens:
            return f"until.tokens={end.tokens}, and {state.tokens} were sampled"
        if not self._has_reached_accuracy():
            return ""
        return f"until.accuracy={end.accuracy:g}, and {state.accuracy:.3f} was measured"

    def _has_reached_accuracy(self) -> bool:
        end = self._ends[self.state.index]
        if end is None or end.accuracy is None or self.state.accuracy is None:
            return False
        return self.state.accuracy >= end.accuracy

    def advance(self, step: int) -> list[tuple[int, str]]:
        """Move to the phase of `step`. Returns the phases that ended before it, with the reason."""
        ended_phases: list[tuple[int, str]] = []
        while self.state.index + 1 < len(self._ends):
            reason = self.ending_reason(step)
            if not reason:
                break
            ended_phases.append((self.state.index, reason))
            self.state = msgspec.structs.replace(
                self.state, index=self.state.index + 1, accuracy=None
            )
        return ended_phases


class Curriculum:
    """Rank 0's view of the phases.

    open_parts: opens the parts of a step with the settings of a phase. log: writes a line for the
    user.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        open_parts: Callable[[Configuration], StepParts],
        dispatcher: Dispatcher,
        log: Callable[[str], None],
    ) -> None:
        self._phases = phases
        self._open_parts = open_parts
        self._dispatcher = dispatcher
        self._log = log
        self._schedule = PhaseSchedule([phase.settings.until for phase in phases])
        self._announced_index: int | None = None  # the phase that the run has logged and begun
        self._entered_index: int | None = None  # the phase whose settings this process uses

    @property
    def state(self) -> PhaseState:
        """The phase and its progress, for a checkpoint."""
        return self._schedule.state

    @property
    def ending_by_accuracy(self) -> str:
        """The setting of the first phase from the current one on that ends by accuracy, or ""."""
        for phase in self._phases[self.state.index :]:
            end = phase.settings.until
            if end is not None and end.accuracy is not None:
                return f"curriculum[{phase.settings.name}].until.accuracy={end.accuracy:g}"
        return ""

    def restore(self, state: PhaseState) -> None:
        """Resume within a phase that an earlier process has begun."""
        self._schedule.state = state
        self._announced_index = state.index

    def enter(self, step: int, parts: StepParts) -> StepParts:
        """Move to the phase of a step, and return its parts."""
        for index, reason in self._schedule.advance(step):
            name = self._phases[index].settings.name
            self._log(f"phase {name} ended before step {step}: {reason}")
        return self.open_phase(step, parts)

    def open_phase(self, step: int, parts: StepParts) -> StepParts:
        """Return the parts of the current phase: the present ones, or new ones that continue.

        Every rank enters a new phase too.
        """
        index = self._schedule.state.index
        if index == self._entered_index:
            return parts
        phase = self._phases[index]
        new_parts = self._open_parts(phase.configuration)
        new_parts.rollouts.restore(parts.rollouts.state())
        self._dispatcher.run(EnterPhase(index))
        if index != self._announced_index:
            self._announce(step, phase)
            if phase.settings.reset_certainty == "all":
                new_parts.rollouts.inflate_variance()
        self._announced_index = index
        self._entered_index = index
        return new_parts

    def update(self, values: dict[str, float]) -> dict[str, float]:
        """Take the metrics of a step that phases end by; returns the metrics of the phase."""
        self._schedule.update(round(values["rollout/tokens"]), values.get("eval/accuracy"))
        return {"phase/index": float(self.state.index), "phase/tokens": float(self.state.tokens)}

    def last_step(self, step: int) -> int:
        """Return the last step that is certain to belong to the present phase, at least `step`.

        A phase may also end by a number of tokens or an accuracy. The steps whose rollouts were
        sampled before that is known still belong to it.
        """
        end = self._phases[self.state.index].settings.until
        if self._schedule.ending_reason(step):
            return step
        if end is None or end.steps is None:
            return sys.maxsize
        return max(step, end.steps)

    def ending_reason(self, step: int) -> str:
        """Return why the last phase, and with it the run, ends with `step`, or an empty string."""
        if self.state.index < len(self._phases) - 1:
            return ""
        reason = self._schedule.ending_reason(step + 1)
        if not reason:
            return ""
        return f"{reason} of {self._phases[-1].settings.name}, the last phase of the curriculum"

    def _announce(self, step: int, phase: Phase) -> None:
        changes = ", ".join(f"{key}={value}" for key, value in phase.changes.items())
        number = f"{self._schedule.state.index + 1} of {len(self._phases)}"
        self._log(
            f"phase {phase.settings.name} ({number}) begins with step {step}: "
            f"{changes or 'nothing changes'}"
        )


def apply_phase(worker: Worker, c: Configuration) -> None:
    """Give a rank's worker the loss, temperature and learning rate of a phase.

    A user-defined loss stays, because phases cannot change its options.
    """
    loss = worker.policy.loss
    if not isinstance(c.algo, CustomAlgoSettings):
        loss = open_loss(c.algo, worker.shape)
    vocab_size = worker.shape.vocab_size
    logprobs = ResponseLogprobs(
        c.train,
        c.rollout,
        vocab_size=vocab_size,
        entropy_grad=worker.policy.regularization.entropy_grad,
        **worker.layout.groups,
    )
    worker.set_objective(loss, logprobs, c.optimizer.lr)
