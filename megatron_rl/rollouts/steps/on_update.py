"""Handles responses that are open when the engines get other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.rollouts.queue import HeldRequests
from megatron_rl.rollouts.steps.steps_ahead import StepsAhead, StepSource


class ResponseControl(Protocol):
    """Stops and continues the responses of all engines."""

    def can_sample(self) -> bool:
        """Return False while nothing samples rollouts."""
        ...

    def interrupt(self, idle: Callable[[], None]) -> HeldRequests:
        """Stop all responses in the middle, until `proceed`. idle: called regularly."""
        ...

    def proceed(self) -> None:
        """Continue the responses that were stopped."""
        ...

    def settle(self, idle: Callable[[], None]) -> HeldRequests:
        """Wait until every response has ended or has used up its budget."""
        ...


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


@dataclass(frozen=True)
class WaitForResponses:
    """Waits until the open step is sampled whole.

    Without an engine nothing can sample it: the old weights are gone. It is then sampled with the
    new ones. can_sample: returns False while no engine serves.
    """

    steps_ahead: StepsAhead
    can_sample: Callable[[], bool]
    is_quiet: bool = True

    def before_sync(self, source: StepSource) -> int:
        self.steps_ahead.complete(source, self.can_sample)
        return source.count_tokens()

    def after_sync(self, source: StepSource) -> None:
        self.steps_ahead.complete(source)


@dataclass(frozen=True)
class ParkResponses:
    """Waits until each response has ended or used up its budget. The next weights continue it."""

    control: ResponseControl
    idle: Callable[[], None]
    is_quiet: bool = False

    def before_sync(self, source: StepSource) -> int:
        return self.control.settle(self.idle).num_new_tokens

    def after_sync(self, source: StepSource) -> None:
        """Do nothing: the new version continues the responses."""


@dataclass(frozen=True)
class InterruptResponses:
    """Stops responses in the middle. The next weights continue them, on any engine."""

    control: ResponseControl
    idle: Callable[[], None]
    is_quiet: bool = False

    def before_sync(self, source: StepSource) -> int:
        return self.control.interrupt(self.idle).num_new_tokens

    def after_sync(self, source: StepSource) -> None:
        self.control.proceed()


def open_steps_ahead(
    settings: RolloutSettings, control: ResponseControl, idle: Callable[[], None]
) -> tuple[StepsAhead, OnUpdate]:
    """Make both parts of sampling ahead from the settings.

    idle: called regularly while responses come to rest.
    """
    steps_ahead = StepsAhead(
        settings.max_staleness,
        continues_responses=settings.on_update != "wait",
        tokens_per_version=settings.tokens_per_version,
    )
    on_update: OnUpdate = WaitForResponses(steps_ahead, control.can_sample)
    if settings.on_update == "budget":
        on_update = ParkResponses(control, idle)
    elif settings.on_update == "resume":
        on_update = InterruptResponses(control, idle)
    return steps_ahead, on_update
