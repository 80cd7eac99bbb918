"""Messages between a collector and the process of a user-defined class."""

from __future__ import annotations

from typing import Any

import msgspec

from megatron_rl.config.schema import EnvironmentSettings, RewardSettings
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.contracts.wire_types import Count
from megatron_rl.rewards.user_calls import Ending

HEARTBEAT_SECONDS = 0.5  # between two messages of a process that does nothing else


class OpenClass(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
    """Construct the class. The first message, and the only one before `ClassReady`.

    search_path: where modules are looked up, as in the collector.
    reward, environment: settings of the class. One of them is None.
    grace_s: seconds from the cancellation of a call until it counts as a call that goes on.
    """

    search_path: tuple[str, ...]
    grace_s: float
    reward: RewardSettings | None = None
    environment: EnvironmentSettings | None = None

    @property
    def section(self) -> RewardSettings | EnvironmentSettings:
        """The settings of the class."""
        section = self.reward or self.environment
        assert section is not None
        return section

    @property
    def max_silence_s(self) -> float:
        """Seconds without a message after which the process is ended.

        A call that blocks the event loop for so long is over its time, with its grace.
        """
        return self.section.timeout_s + self.grace_s + 2 * HEARTBEAT_SECONDS


class ScoreCall(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Score one response."""

    call: Count
    prompt: Prompt
    text: str
    finish_reason: FinishReason


class PlayCall(msgspec.Struct, frozen=True, kw_only=True, tag="play"):
    """Play one episode."""

    call: Count
    prompt: Prompt


class CancelCall(msgspec.Struct, frozen=True, tag="cancel"):
    """Cancel a call. It may have ended already."""

    call: Count


class ActionError(msgspec.Struct, frozen=True, kw_only=True):
    """Exception of an action of an episode.

    kind: name of its class. reason: why the rollout is rejected, "" for other exceptions.
    """

    kind: str
    message: str
    reason: str = ""


class EpisodeState(msgspec.Struct, frozen=True, kw_only=True, tag="state"):
    """State of an episode after an action, in answer to it."""

    call: Count
    action: Count
    text: str
    finish_reason: FinishReason | None
    sampled_tokens: Count
    rejected_tokens: dict[str, int]
    error: ActionError | None = None


class ClassReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The class is constructed. chat_roles: the roles of an environment."""

    chat_roles: tuple[str, ...] = ()


class ClassFailure(msgspec.Struct, frozen=True, tag="failure"):
    """The class cannot be opened."""

    reason: str


class Heartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """The event loop of the process runs.

    slowest_call: the call that has run longest, 0 for none. seconds: how long.
    """

    slowest_call: Count = 0
    seconds: float = 0.0


class VerdictOfCall(msgspec.Struct, frozen=True, tag="verdict"):
    """A call of the scorer has ended, with this verdict."""

    call: Count
    verdict: Verdict


class CallEnd(msgspec.Struct, frozen=True, tag="end"):
    """A call has ended without a verdict and without an exception."""

    call: Count
    ending: Ending


class CallError(msgspec.Struct, frozen=True, kw_only=True, tag="error"):
    """A call of the environment has raised an exception.

    action: number of the episode's action that raised it, 0 if it is the environment's own.
    """

    call: Count
    description: str
    trace: str
    action: Count = 0


class RespondAction(msgspec.Struct, frozen=True, tag="respond"):
    """Let the model respond. Actions of a call are numbered from 1."""

    call: Count
    action: Count


class WithdrawAction(msgspec.Struct, frozen=True, tag="withdraw"):
    """The environment no longer waits for a response."""

    call: Count
    action: Count


class ObserveAction(msgspec.Struct, frozen=True, tag="observe"):
    """Add a text."""

    call: Count
    action: Count
    text: str


class ObserveMessagesAction(msgspec.Struct, frozen=True, tag="observe_messages"):
    """Add messages of a chat."""

    call: Count
    action: Count
    messages: list[dict[str, Any]]


class DemonstrateAction(msgspec.Struct, frozen=True, tag="demonstrate"):
    """Add a demonstration."""

    call: Count
    action: Count
    text: str


# The process waits for the answer to these, on a connection of their own.
QuickAction = WithdrawAction | ObserveAction | ObserveMessagesAction | DemonstrateAction
ToProcess = OpenClass | ScoreCall | PlayCall | CancelCall | EpisodeState
FromProcess = (
    ClassReady | ClassFailure | Heartbeat | VerdictOfCall | CallEnd | CallError | RespondAction
)
