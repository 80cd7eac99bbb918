"""Writes the timeline of a run: groups of rollouts as they arrive, and commands as they end."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_rl.contracts.commands import Checkpoint, Command, Poll, Train
from megatron_rl.records.timeline.spans import Lane, Timeline
from megatron_rl.rollouts.messages import GroupDone

_STEP = re.compile(r"step-(\d+)-")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


@dataclass(frozen=True)
class RunTimeline:
    """Turns what rank 0 does into spans."""

    timeline: Timeline

    def add_command(self, command: Command, seconds: float) -> None:
        """Add a command that all ranks have executed."""
        if isinstance(command, Poll):
            return
        step = -1
        if isinstance(command, Train):
            step = command.plan.step
        elif isinstance(command, Checkpoint):
            step = command.step
        name = _WORD.sub(" ", type(command).__name__).lower()
        self.timeline.add(Lane.RANKS, name, seconds, step=step)

    def add_group(self, answer: GroupDone, seconds: float) -> None:
        """Add a group that has arrived. seconds: since it was requested.

        It may have been complete for a while: this process reads no message while it trains.
        """
        group_id = answer.group.group_id
        match = _STEP.match(group_id)
        step = -1 if match is None else int(match[1])
        self.timeline.add(
            Lane.ROLLOUTS,
            group_id,
            min(answer.seconds, seconds),
            ago=max(0.0, seconds - answer.seconds),
            step=step,
            tokens=answer.generated_tokens,
        )
