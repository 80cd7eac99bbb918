"""One process of a user-defined class with the calls that run in it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import Any, Protocol

from megatron_rl.contracts.plugins import PluginError
from megatron_rl.rewards.user_calls import Ending, Outcome
from megatron_rl.rollouts.user_process.attempts import Attempt, Cause, Loss, RunningCall, refuse
from megatron_rl.rollouts.user_process.messages import (
    CallEnd,
    CallError,
    CancelCall,
    ClassReady,
    EpisodeState,
    FromProcess,
    OpenClass,
    QuickAction,
    RespondAction,
    VerdictOfCall,
)
from megatron_rl.rollouts.user_process.process import UserProcess
from megatron_rl.rollouts.user_process.watch import ProcessWatch, Warn
from sglang_bridge.server.lifeline import Lifeline

_log = logging.getLogger(__name__)


class UserCodeError(Exception):
    """An exception that a call raised in its process.

    trace: its traceback, as a text.
    """

    def __init__(self, description: str, trace: str) -> None:
        super().__init__(description)
        self.trace = trace


class Tell(Protocol):
    """Says that a call or a process did not end as it should. subject: the call at work."""

    def __call__(self, text: str, subject: str) -> None: ...


class ServingProcess:
    """A process of a class, which makes calls until it is lost or closed.

    It is lost when it ends, closes its connection, sends something else than results, or is silent
    for too long. It is then ended with everything that it has started, and each of its calls has a
    `Loss`. The process itself limits the time of its calls.

    name: key and name of the class. warn: receives lines about slow calls.
    """

    def __init__(
        self, name: str, settings: OpenClass, *, lifeline: Lifeline, tell: Tell, warn: Warn
    ) -> None:
        self._process = UserProcess(name, settings, lifeline=lifeline)
        self._tell = tell
        self._calls: dict[int, RunningCall] = {}
        self._numbers = itertools.count(1)
        self._grace_s = settings.grace_s
        self._has_leftovers = False
        self._is_unwanted = False
        self._opening: asyncio.Future[ClassReady] | None = None
        self._end: asyncio.Task[None] | None = None
        self._watch = ProcessWatch(
            self._process,
            self._calls,
            max_silence_s=settings.max_silence_s,
            end=self._lose,
            warn=warn,
        )

    @property
    def is_serving(self) -> bool:
        """True until it is lost or closed."""
        return self._end is None

    def wait_until_open(self, timeout_s: float) -> ClassReady:
        """Wait until the class is constructed. Blocks. Raises `PluginError`."""
        return self._process.wait_until_open(
            timeout_s, _log.warning, is_unwanted=lambda: self._is_unwanted
        )

    async def open(self, timeout_s: float) -> None:
        """Wait until the class is constructed, and exchange messages from then on.

        Raises `PluginError`. The caller then closes it.
        """
        self._opening = asyncio.ensure_future(asyncio.to_thread(self.wait_until_open, timeout_s))
        await asyncio.shield(self._opening)  # a thread cannot be cancelled
        await self.serve()

    async def serve(self) -> None:
        """Exchange messages with a process that is open."""
        if self._is_unwanted:
            raise PluginError(f"{self._process.name}: the collector ends")
        await self._process.connect(
            self._receive, self._perform, lambda reason: self._lose(reason, waits_for_exit=True)
        )
        if self.is_serving:
            self._watch.start()

    async def make(self, attempt: Attempt, subject: str) -> Outcome[Any] | Loss:
        """Make a call, and return how it ended. Cancelling this cancels the call."""
        if not self.is_serving:
            return Loss(Cause.UNKNOWN, "it ended before the call")
        number = next(self._numbers)
        self._process.send(attempt.message(number))
        call = RunningCall(attempt, subject, asyncio.get_running_loop().create_future())
        self._calls[number] = call
        try:
            return await call.end
        except asyncio.CancelledError:
            self._forget(number)
            self._process.send(CancelCall(number))
            raise

    async def close(self) -> None:
        """Let the process end by itself for a second, and then end it. You may call it again."""
        self._is_unwanted = True
        if self._opening is not None:
            await asyncio.wait({self._opening})
        if self._end is None:
            self._watch.stop()
            self._process.disconnect()
            self._end = asyncio.create_task(asyncio.to_thread(self._process.finish))
            for number in list(self._calls):
                self._settle(number, Loss(Cause.UNKNOWN, "the collector ends"))
        await self._end

    def end_now(self) -> None:
        """End the process, outside of an event loop."""
        self._process.end()

    def _receive(self, message: FromProcess) -> None:
        self._watch.hear(message)
        match message:
            case RespondAction():
                call = self._calls.get(message.call)
                if call is None:
                    self._process.send(refuse(message))
                else:
                    call.attempt.respond(message, self._answer)
            case VerdictOfCall():
                self._settle(message.call, Outcome(Ending.RETURNED, value=message.verdict))
            case CallEnd():
                if message.ending is Ending.IGNORED:
                    self._note_leftover(message.call)
                self._settle(message.call, Outcome(message.ending))
            case CallError() if message.call in self._calls:
                error = self._calls[message.call].attempt.error_of(message.action)
                error = error or UserCodeError(message.description, message.trace)
                self._settle(message.call, Outcome(Ending.RAISED, error=error))

    def _perform(self, action: QuickAction) -> EpisodeState:
        call = self._calls.get(action.call)
        return refuse(action) if call is None else call.attempt.perform(action)

    def _answer(self, state: EpisodeState) -> None:
        self._process.send(state)

    def _settle(self, number: int, result: Outcome[Any] | Loss) -> None:
        call = self._forget(number)
        if call is not None and not call.end.done():
            call.end.set_result(result)

    def _forget(self, number: int) -> RunningCall | None:
        """Take a call that has ended off the list. Nothing happens if it has been."""
        call = self._calls.pop(number, None)
        if call is not None:
            call.attempt.close()
            if self._has_leftovers and not self._calls:
                self._lose("a call that ignored its cancellation goes on in it")
        return call

    def _note_leftover(self, number: int) -> None:
        self._has_leftovers = True
        self._tell(
            f"a call ignored its cancellation for {self._grace_s:g} s; its process is replaced "
            "when no other call runs in it",
            self._describe(number),
        )

    def _describe(self, number: int) -> str:
        """Name the call whose code runs. number: 0 for none."""
        if not number:
            return "no call ran code"
        call = self._calls.get(number)
        return "a call that has ended" if call is None else call.subject

    def _lose(self, reason: str, *, waits_for_exit: bool = False) -> None:
        if self._end is None:
            self._watch.stop()
            self._end = asyncio.create_task(self._replace(reason, waits_for_exit=waits_for_exit))

    async def _replace(self, reason: str, *, waits_for_exit: bool) -> None:
        """End a process that is lost, and give its calls back."""
        running = self._process.current.get()
        if waits_for_exit:
            exit_text = await asyncio.to_thread(self._process.wait_for_exit)
            reason = f"{reason} ({exit_text})"
        self._process.request_end()
        self._process.disconnect()
        if self._calls:
            self._tell(f"{reason}; its process was killed and is replaced", self._describe(running))
        else:
            _log.warning("%s: %s; its process was killed", self._process.name, reason)
        for number in list(self._calls):
            cause = Cause.OWN if number == running else Cause.OTHER if running else Cause.UNKNOWN
            self._settle(number, Loss(cause, reason))
        await asyncio.to_thread(self._process.end)
