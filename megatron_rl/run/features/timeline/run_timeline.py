"""Writes the timeline of a run: groups of rollouts as they arrive, and commands as they end."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator

from megatron_rl.contracts.commands import Checkpoint, Command, Poll, Train
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Lane, Timeline
from megatron_rl.rollouts.wire.messages import GroupDone
from megatron_rl.run.features.observer import Observer
from megatron_rl.run.features.parts import FeatureParts

_STEP = re.compile(r"step-(\d+)-")
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")


class RunTimeline(Observer):
    """Turns what rank 0 does into spans."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    @contextlib.contextmanager
    def around(self, command: Command) -> Iterator[None]:
        """Add a command that does not fail."""
        start = time.perf_counter()
        yield
        self.add_command(command, time.perf_counter() - start)

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
        self._timeline.add(Lane.RANKS, name, seconds, step=step)

    def add_group(self, answer: GroupDone, seconds: float) -> None:
        """Add a group that has arrived. seconds: since it was requested.

        It may have been complete for a while: this process reads no message while it trains.
        """
        group_id = answer.group.group_id
        match = _STEP.match(group_id)
        step = -1 if match is None else int(match[1])
        self._timeline.add(
            Lane.ROLLOUTS,
            group_id,
            min(answer.seconds, seconds),
            ago=max(0.0, seconds - answer.seconds),
            step=step,
            tokens=answer.generated_tokens,
        )


def open_timeline(parts: FeatureParts) -> RunTimeline | None:
    """Return the timeline of rank 0, None on other ranks."""
    setup = parts.setup
    if setup.job.rank:
        return None
    file = setup.directory.path / TIMELINE_FILE
    timeline = RunTimeline(parts.enter(Timeline(file, setup.progress.log)))
    if parts.connections is not None:
        parts.connections.queue.on_arrival = timeline.add_group
    return timeline
