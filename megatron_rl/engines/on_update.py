"""Handles responses that are open when the engines get other weights, or a checkpoint is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group
from megatron_rl.rollouts.steps.steps_ahead import SecondsToStop, StepsAhead, StepSource

if TYPE_CHECKING:
    from megatron_rl.engines.connections import EngineConnections


class OnUpdate(Protocol):
    """Handles responses that are open when the engines get other weights.

    is_quiet: no request is open between two steps.
    """

    @property
    def is_quiet(self) -> bool: ...

    def before_sync(self, source: StepSource) -> int:
        """Let no engine work. Returns the tokens that were sampled since the last call."""
        ...

    def after_sync(self, source: StepSource) -> None:
        """Let engines work on what is open."""
        ...

    def before_save(
        self, source: StepSource, seconds_to_stop: SecondsToStop
    ) -> Mapping[int, tuple[Group, ...]]:
        """Return the sampled parts of the groups of open steps, by step, for a checkpoint.

        seconds_to_stop: called regularly. A run that has to stop has little time.
        """
        ...

    def after_save(self) -> None:
        """Free what `before_save` has stored."""
        ...

    @property
    def num_uncounted(self) -> int:
        """The known number of sampled tokens that the next `before_sync` will count."""
        ...


@dataclass(frozen=True)
class WaitForResponses:
    """Waits until the open step is sampled whole.

    Without an engine nothing can sample it: the old weights are gone. It is then sampled with the
    new ones. can_sample: returns False while no engine serves.
    """

    steps_ahead: StepsAhead
    can_sample: Callable[[], bool]
    is_quiet: bool = True
    num_uncounted: int = 0

    def before_sync(self, source: StepSource) -> int:
        self.steps_ahead.complete(source, self.can_sample)
        return source.count_tokens()

    def after_sync(self, source: StepSource) -> None:
        self.steps_ahead.complete(source)

    def before_save(
        self, source: StepSource, seconds_to_stop: SecondsToStop
    ) -> Mapping[int, tuple[Group, ...]]:
        """Complete the open step, if there is time for it. Nothing is open then."""
        self.steps_ahead.complete_for_save(source, seconds_to_stop)
        return {}

    def after_save(self) -> None:
        """Do nothing: nothing is stored."""


@dataclass
class InterruptResponses:
    """Stops responses in the middle. The next weights continue them, on any engine.

    stores_partials: a checkpoint holds them. If not, they are sampled to their end before one.
    """

    connections: EngineConnections
    idle: Callable[[], None]
    steps_ahead: StepsAhead
    stores_partials: bool
    is_quiet: bool = False
    num_uncounted: int = 0

    def before_sync(self, source: StepSource) -> int:
        num_tokens = self.num_uncounted + self.connections.interrupt(self.idle)
        self.num_uncounted = 0
        return num_tokens

    def after_sync(self, source: StepSource) -> None:
        self.connections.proceed()

    def before_save(
        self, source: StepSource, seconds_to_stop: SecondsToStop
    ) -> Mapping[int, tuple[Group, ...]]:
        """Store the sampled parts of open responses, or complete them if there is time for it."""
        if self.stores_partials:
            if not source.open_steps:
                return {}
            partials = self.connections.store_partials(self.idle, seconds_to_stop)
            self.num_uncounted += partials.num_new_tokens
            return source.open_groups(partials.groups)
        self.steps_ahead.complete_for_save(source, seconds_to_stop)
        if not source.open_steps and seconds_to_stop() is None:
            # A resumed run gets the new tokens with the checkpoint
            self.num_uncounted += self.connections.interrupt(self.idle)
            self.connections.proceed()
        return {}

    def after_save(self) -> None:
        self.connections.release_partials()


def open_steps_ahead(
    settings: RolloutSettings,
    connections: EngineConnections,
    idle: Callable[[], None],
    *,
    stores_partials: bool = True,
) -> tuple[StepsAhead, OnUpdate]:
    """Make both parts of sampling ahead from the settings.

    idle: called regularly while responses come to rest. stores_partials: the sampled part of a
    rollout can be stored.
    """
    resumes = settings.on_update == "resume"
    steps_ahead = StepsAhead(settings.max_staleness, continues_responses=resumes)
    if resumes:
        return steps_ahead, InterruptResponses(connections, idle, steps_ahead, stores_partials)
    return steps_ahead, WaitForResponses(steps_ahead, connections.can_sample)
