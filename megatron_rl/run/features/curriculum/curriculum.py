"""The phases of a run, one after another: when one ends, and what the next one changes.

See docs/curriculum.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.curriculum import Phase, PhaseEnd, phases_of
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import EnterPhase
from megatron_rl.contracts.wire_types import Count
from megatron_rl.losses import open_loss
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts
from megatron_rl.run.loop.step_parts import StepParts
from megatron_rl.training.dispatcher import CommandTable
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.worker import Worker


class PhaseState(msgspec.Struct, frozen=True, kw_only=True):
    """Position in the curriculum.

    index: 0-based current phase.
    tokens: tokens that engines sampled in all steps so far.
    accuracy: the last evaluation of this phase, or the one that ends it. None before the first.
    """

    index: Count = 0
    tokens: Count = 0
    accuracy: float | None = None


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


class RankPhases(Observer):
    """A rank's part in the curriculum. worker: gets the settings of each phase."""

    name = "curriculum"

    def __init__(self, phases: Sequence[Phase], worker: Worker) -> None:
        self._phases = phases
        self._worker = worker

    def handlers(self) -> CommandTable:
        """Return the handler of `EnterPhase`."""
        return {EnterPhase: self._enter}

    def _enter(self, command: EnterPhase) -> None:
        """Train with the settings of a phase from the next step on."""
        apply_phase(self._worker, self._phases[command.phase].configuration)


class Curriculum(RankPhases):
    """Rank 0's view of the phases.

    run: runs a command on all ranks. log: writes a line for the user.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        worker: Worker,
        run: Callable[[EnterPhase], Any],
        log: Callable[[str], None],
    ) -> None:
        super().__init__(phases, worker)
        self._run = run
        self._log = log
        self._schedule = PhaseSchedule([phase.settings.until for phase in phases])
        self._announced_index: int | None = None  # the phase that the run has logged and begun
        self._entered_index: int | None = None  # the phase whose settings this process uses

    def state(self) -> dict[str, Any]:
        """Return the phase and its progress."""
        state: dict[str, Any] = msgspec.to_builtins(self._schedule.state)
        return state

    def state_to_save(
        self, state: dict[str, Any], *, has_open_steps: bool, num_uncounted: int
    ) -> dict[str, Any]:
        """Return the present phase with open steps, which belong to it. The point may be older."""
        return self.state() if has_open_steps else state

    def restore(self, state: dict[str, Any]) -> None:
        """Resume within a phase that an earlier process has begun, if there is one."""
        if state:
            self._schedule.state = msgspec.convert(state, PhaseState)
            self._announced_index = self._schedule.state.index

    def configuration(self, c: Configuration) -> Configuration:
        """Return the configuration of the present phase."""
        return self._phases[self._schedule.state.index].configuration

    def accuracy_key(self) -> str:
        """Return the setting of the first phase from the current one on that ends by accuracy."""
        for phase in self._phases[self._schedule.state.index :]:
            end = phase.settings.until
            if end is not None and end.accuracy is not None:
                return f"curriculum[{phase.settings.name}].until.accuracy={end.accuracy:g}"
        return ""

    def before_step(self, step: int, parts: StepParts, *, is_under_way: bool) -> None:
        """Enter the phase of a step.

        A phase that has ended keeps the steps whose rollouts it has sampled already.
        """
        if not is_under_way:
            for index, reason in self._schedule.advance(step):
                name = self._phases[index].settings.name
                self._log(f"phase {name} ended before step {step}: {reason}")
        index = self._schedule.state.index
        if index == self._entered_index:
            return
        phase = self._phases[index]
        parts.switch(phase.configuration)
        self._run(EnterPhase(index))
        if index != self._announced_index:
            self._announce(step, phase)
            if phase.settings.reset_certainty == "all":
                parts.rollouts.inflate_variance()
        self._announced_index = index
        self._entered_index = index

    def close_step(self, values: Mapping[str, float]) -> dict[str, float]:
        """Take the metrics of a step that phases end by; returns the metrics of the phase."""
        self._schedule.update(round(values["rollout/tokens"]), values.get("eval/accuracy"))
        state = self._schedule.state
        return {"phase/index": float(state.index), "phase/tokens": float(state.tokens)}

    def last_step(self, step: int) -> int:
        """Return the last step that is certain to belong to the present phase, at least `step`.

        A phase may also end by a number of tokens or an accuracy. The steps whose rollouts were
        sampled before that is known still belong to it.
        """
        end = self._phases[self._schedule.state.index].settings.until
        if self._schedule.ending_reason(step):
            return step
        if end is None or end.steps is None:
            return sys.maxsize
        return max(step, end.steps)

    def ending_key(self, step: int) -> str:
        """Return why the last phase, and with it the run, ends with `step`, or an empty string."""
        if self._schedule.state.index < len(self._phases) - 1:
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
        c.rollout,
        vocab_size=vocab_size,
        entropy_grad=worker.policy.regularization.entropy_grad,
        **worker.layout.groups,
    )
    worker.set_objective(loss, logprobs, c.optimizer.lr)


def open_curriculum(parts: FeatureParts) -> RankPhases | None:
    """Return this rank's part, None without the key `curriculum` and where nothing is trained."""
    phases = phases_of(parts.configuration)
    if not phases or parts.worker is None:
        return None
    if parts.setup.job.rank:
        return RankPhases(phases, parts.worker)
    return Curriculum(phases, parts.worker, parts.dispatcher.run, parts.setup.progress.log)
