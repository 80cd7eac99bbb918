"""Calls in a process, and what the collector does for them while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.environments.episode import Episode
from megatron_rl.rewards.user_calls import Outcome
from megatron_rl.rollouts.user_process.messages import (
    ActionError,
    DemonstrateAction,
    EpisodeState,
    ObserveAction,
    ObserveMessagesAction,
    PlayCall,
    QuickAction,
    RespondAction,
    ScoreCall,
    ToProcess,
    WithdrawAction,
)

Answer = Callable[[EpisodeState], None]


class Attempt:
    """One attempt of a call."""

    def message(self, call: int) -> ToProcess:
        """Return the message that makes the call."""
        raise NotImplementedError

    def respond(self, action: RespondAction, answer: Answer) -> None:
        """Let the model respond, and answer later. Only an environment requests it."""

    def perform(self, action: QuickAction) -> EpisodeState:
        """Perform an action of the environment, and return the answer."""
        raise NotImplementedError

    def error_of(self, action: int) -> Exception | None:
        """Return the exception of an action, None for other numbers."""
        return None

    def close(self) -> None:
        """End what still runs for the attempt."""


class ScoreAttempt(Attempt):
    """One attempt to score a response."""

    def __init__(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> None:
        self._prompt = prompt
        self._text = text
        self._finish_reason = finish_reason

    def message(self, call: int) -> ToProcess:
        return ScoreCall(
            call=call, prompt=self._prompt, text=self._text, finish_reason=self._finish_reason
        )


class EpisodeAttempt(Attempt):
    """One attempt to play an episode. A further attempt has an episode of its own."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self._errors: dict[int, Exception] = {}
        self._responses: dict[int, asyncio.Task[None]] = {}
        self._withdrawn: set[int] = set()

    def message(self, call: int) -> ToProcess:
        return PlayCall(call=call, prompt=self.episode.prompt)

    def respond(self, action: RespondAction, answer: Answer) -> None:
        if action.action in self._withdrawn:
            return  # it came later: the two take two connections
        task = asyncio.create_task(self._respond(action, answer))
        self._responses[action.action] = task
        task.add_done_callback(lambda task: self._responses.pop(action.action))

    def perform(self, action: QuickAction) -> EpisodeState:
        try:
            match action:
                case WithdrawAction():
                    self._withdrawn.add(action.action)
                    if action.action in self._responses:
                        self._responses[action.action].cancel()
                        self.episode.withdraw()
                case ObserveAction():
                    self.episode.observe(action.text)
                case ObserveMessagesAction():
                    self.episode.observe_messages(action.messages)
                case DemonstrateAction():
                    self.episode.demonstrate(action.text)
        except Exception as error:
            return self._state(action.call, action.action, error)
        return self._state(action.call, action.action)

    def error_of(self, action: int) -> Exception | None:
        return self._errors.get(action)

    def close(self) -> None:
        for task in self._responses.values():
            task.cancel()

    async def _respond(self, action: RespondAction, answer: Answer) -> None:
        try:
            await self.episode.respond()
        except Exception as error:
            answer(self._state(action.call, action.action, error))
        else:
            answer(self._state(action.call, action.action))

    def _state(self, call: int, action: int, error: Exception | None = None) -> EpisodeState:
        description = None
        if error is not None:
            self._errors[action] = error
            description = ActionError(
                kind=_kind_of(error), message=str(error), reason=getattr(error, "reason", "")
            )
        return EpisodeState(
            call=call,
            action=action,
            text=self.episode.text,
            finish_reason=self.episode.finish_reason,
            sampled_tokens=self.episode.sampled_tokens,
            rejected_tokens=dict(self.episode.rejected_tokens),
            error=description,
        )


def _kind_of(error: Exception) -> str:
    """Return the class of an exception that an environment may tell from others."""
    names = [kind.__name__ for kind in type(error).__mro__]
    kinds = ("RequestExpired", "EngineError", "RolloutRejected", "RouteError", "GenerationRejected")
    others = ("UnknownText", "ValueError", names[0])
    return next(kind for kind in (*kinds, *others) if kind in names)


def refuse(action: RespondAction | QuickAction) -> EpisodeState:
    """Return the answer to an action of a call that has ended.

    Without one, code that a call has left behind would wait for ever, and with it the event loop.
    """
    return EpisodeState(
        call=action.call,
        action=action.action,
        text="",
        finish_reason=None,
        sampled_tokens=0,
        rejected_tokens={},
        error=ActionError(kind="CallEnded", message="the call of this episode has ended"),
    )


class Cause(Enum):
    """The call whose code ran when a process was lost."""

    OWN = auto()  # this call's
    OTHER = auto()  # another call's
    UNKNOWN = auto()  # no call's: the process may have been stopped, or killed for want of memory


@dataclass(frozen=True)
class Loss:
    """A call has lost its process."""

    cause: Cause
    reason: str


@dataclass(eq=False)
class RunningCall:
    """A call in a process. subject: names what it works on."""

    attempt: Attempt
    subject: str
    end: asyncio.Future[Outcome[Any] | Loss]
