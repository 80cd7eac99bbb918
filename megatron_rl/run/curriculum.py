"""The stages of a run, one after another: when one ends, and what changes with the next
(docs/curriculum.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec

from megatron_rl.config.algorithms import CustomAlgoSettings
from megatron_rl.config.curriculum import Phase, PhaseEnd, phases_of
from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.commands import EnterPhase
from megatron_rl.contracts.run_state import PhaseState
from megatron_rl.losses import open_loss
from megatron_rl.training.dispatcher import Dispatcher
from megatron_rl.training.logprobs import ResponseLogprobs
from megatron_rl.training.worker import Worker

if TYPE_CHECKING:
    from megatron_rl.run.leader import Stages


class Schedule:
    """Which stage a step belongs to. Nothing but what `state` holds decides it, so that a resumed
    run goes the same way (tests/run/test_curriculum.py). untils: of each stage."""

    def __init__(self, untils: Sequence[PhaseEnd | None]) -> None:
        self._untils = untils
        self.state = PhaseState()

    def note(self, tokens: int, accuracy: float | None) -> None:
        """After a step: what engines drew for it, and what was measured after it, if anything."""
        known = self.state.accuracy if accuracy is None else accuracy
        self.state = msgspec.structs.replace(
            self.state, tokens=self.state.tokens + tokens, accuracy=known
        )

    def ended(self, step: int) -> str:
        """Why the present stage has no part in a step; empty where it has."""
        until, state = self._untils[self.state.index], self.state
        if until is None:
            return ""
        if until.steps is not None and step > until.steps:
            return f"until.steps={until.steps}"
        if until.tokens is not None and state.tokens >= until.tokens:
            return f"until.tokens={until.tokens}, and {state.tokens} were drawn"
        if (
            until.accuracy is not None
            and state.accuracy is not None
            and state.accuracy >= until.accuracy
        ):
            return f"until.accuracy={until.accuracy:g}, and {state.accuracy:.3f} was measured"
        return ""

    def advance(self, step: int) -> list[tuple[int, str]]:
        """Go on to the stage of a step. Returns the stages that ended before it, and why."""
        ended = list[tuple[int, str]]()
        while self.state.index + 1 < len(self._untils) and (reason := self.ended(step)):
            ended.append((self.state.index, reason))
            self.state = msgspec.structs.replace(
                self.state, index=self.state.index + 1, first_step=step, accuracy=None
            )
        return ended


class Curriculum:
    """Rank 0's. parts: of rank 0's steps, with the settings of a stage; say: to a person."""

    def __init__(
        self,
        stages: Sequence[Phase],
        parts: Callable[[Configuration], Stages],
        dispatcher: Dispatcher,
        say: Callable[[str], None],
    ) -> None:
        self._stages, self._parts, self._dispatcher, self._say = stages, parts, dispatcher, say
        self._schedule = Schedule([stage.settings.until for stage in stages])
        self._begun: int | None = None  # which stage the run has told of and widened beliefs for
        self._entered: int | None = None  # and which one this process has the settings of

    @property
    def state(self) -> PhaseState:
        return self._schedule.state

    def restore(self, state: PhaseState) -> None:
        self._schedule.state, self._begun = state, state.index

    def enter(self, step: int, parts: Stages) -> Stages:
        """The parts to run a step with: those given, or others that go on where they were. Tells
        every rank.
        """
        for index, reason in self._schedule.advance(step):
            self._say(f"stage {self._stages[index].settings.name} ended before step {step}: {reason}")
        index = self._schedule.state.index
        if index == self._entered:
            return parts
        stage = self._stages[index]
        changed = self._parts(stage.configuration)
        changed.rollouts.restore(parts.rollouts.state())
        self._dispatcher.run(EnterPhase(index))
        if index != self._begun:
            self._tell(step, stage)
            if stage.settings.reset_certainty == "all":
                changed.rollouts.widen()
        self._begun = self._entered = index
        return changed

    def note(self, values: dict[str, float]) -> dict[str, float]:
        """After a step: takes from its metrics what stages end by, and returns those of its stage."""
        self._schedule.note(round(values["rollout/tokens"]), values.get("eval/accuracy"))
        return {"stage/index": float(self.state.index), "stage/tokens": float(self.state.tokens)}

    def over(self, step: int) -> str:
        """What ended the last stage with this step, and the run with it; empty where nothing did."""
        if self.state.index < len(self._stages) - 1 or not (
            reason := self._schedule.ended(step + 1)
        ):
            return ""
        return f"{reason} of {self._stages[-1].settings.name}, the last of stages"

    def _tell(self, step: int, stage: Phase) -> None:
        changes = (
            ", ".join(f"{key}={value}" for key, value in stage.changes.items()) or "nothing changes"
        )
        place = f"{self._schedule.state.index + 1} of {len(self._stages)}"
        self._say(f"stage {stage.settings.name} ({place}) begins with step {step}: {changes}")


def open_course(
    c: Configuration,
    parts: Callable[[Configuration], Stages],
    dispatcher: Dispatcher,
    say: Callable[[str], None],
) -> Curriculum | None:
    """None for a run without `curriculum`."""
    return Curriculum(phases_of(c), parts, dispatcher, say) if c.curriculum else None


def change(worker: Worker, c: Configuration) -> None:
    """Give a rank's worker the loss, temperature and learning rate of a stage.

    A loss of the user's own stays.
    """
    own = isinstance(c.algo, CustomAlgoSettings)
    logprobs = ResponseLogprobs(
        c.train, c.rollout, vocab_size=worker.shape.vocab_size, **worker.layout.groups
    )
    worker.change(
        worker.policy.loss if own else open_loss(c.algo, worker.shape), logprobs, c.optimizer.lr
    )
