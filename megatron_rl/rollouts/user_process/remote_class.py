"""A user-defined class in a process of its own: its calls, their ends, and the replacement."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.contracts.plugins import PluginError
from megatron_rl.rewards.user_calls import Ending, Outcome
from megatron_rl.rollouts.user_process.attempts import Attempt, RunningCall
from megatron_rl.rollouts.user_process.messages import (
    HEARTBEAT_SECONDS,
    CallEnd,
    CallError,
    CallStart,
    CancelCall,
    EpisodeState,
    FromProcess,
    OpenClass,
    QuickAction,
    RespondAction,
    VerdictOfCall,
)
from megatron_rl.rollouts.user_process.process import UserProcess
from megatron_rl.rollouts.user_process.watch import ProcessWatch
from sglang_bridge.server.lifeline import Lifeline

# From the cancellation of a call to the end of its process
_GRACE_SECONDS = 5.0
_WINDOW_SECONDS = 3600.0
# A process ended this often while the same call ran, and no call could be blamed: the call counts.
_MAX_UNEXPLAINED_ENDS = 2

_log = logging.getLogger(__name__)


class TooManyAbandoned(PluginError):
    """More calls than `rollout.max_abandoned_calls` were ended with their process in an hour."""


class UserProcessEnded(Exception):
    """The process of a user-defined class ended while it ran a call."""


class UserCodeError(Exception):
    """An exception that a call raised in its process.

    trace: its traceback, as a text.
    """

    def __init__(self, description: str, trace: str) -> None:
        super().__init__(description)
        self.trace = trace


@dataclass(frozen=True, kw_only=True)
class UserClassLimits:
    """Limits of a class.

    timeout_s: seconds for one call. open_timeout_s: seconds for the constructor.
    memory: bytes that its processes may use. max_abandoned: ends of its process within an hour.
    """

    timeout_s: float
    open_timeout_s: float
    memory: int
    max_abandoned: int


class RemoteClass:
    """One user-defined class, which a process holds that can be killed.

    A call that is over its time is cancelled. If it goes on for some seconds, its process is ended,
    with everything that it has started, and another process takes its place. The same happens when
    the process uses too much memory, ends by itself or sends invalid messages. The call at fault
    counts as abandoned or failed. The others are made again.

    name: key and name of the class, such as `reward.name=my_reward:Judge`.
    report: sends a warning to rank 0.
    """

    def __init__(
        self,
        name: str,
        settings: OpenClass,
        limits: UserClassLimits,
        *,
        report: Callable[[str], Awaitable[None]] | None = None,
    ) -> None:
        self._name = name
        self._settings = settings
        self._limits = limits
        self._report = report
        self._lifeline = Lifeline()
        self._numbers = itertools.count(1)
        self._calls: dict[int, RunningCall] = {}
        self._ends: deque[float] = deque()
        self._num_ends = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: PluginError | None = None
        self._is_closed = False
        self._process: UserProcess | None = None
        self._lost_process: tuple[UserProcess, str] | None = None
        self._watch: ProcessWatch | None = None
        self._opening: asyncio.Task[None] | None = None
        self._first_process = self._start()

    def wait_until_open(self) -> tuple[str, ...]:
        """Wait until the class is constructed, and return the `chat_roles` of an environment.

        Blocks. Raises `PluginError`.
        """
        return self._first_process.wait_until_open(
            self._limits.open_timeout_s, _log.warning
        ).chat_roles

    async def run(self, open_attempt: Callable[[], Attempt], *, subject: str = "") -> Outcome[Any]:
        """Make a call and return how it ended.

        open_attempt: prepares the call, and again each time that it has to be made again.
        subject: what the call works on, for warnings.
        Raises `TooManyAbandoned`, and `PluginError` if the class cannot be constructed again.
        Cancelling this cancels the call.
        """
        num_unexplained = 0
        while True:
            process = await self._usable_process()
            end = asyncio.get_running_loop().create_future()
            call = RunningCall(next(self._numbers), open_attempt(), subject, end)
            outcome = await self._make(process, call)
            if outcome is not None:
                return outcome
            num_unexplained += not call.is_blameless
            if num_unexplained == _MAX_UNEXPLAINED_ENDS:
                return _failure(f"its process ended {num_unexplained} times while the call ran")

    async def close(self) -> None:
        """End the process and everything that it has started."""
        self._is_closed = True
        self._failure = PluginError(f"{self._name}: the collector ends")
        for call in list(self._calls.values()):
            self._settle(call, None)
        if self._watch is not None:
            self._watch.stop()
        process = self._process or self._first_process
        process.disconnect()
        self._process = None
        await asyncio.to_thread(process.finish)
        if self._opening is not None:
            await asyncio.gather(self._opening, return_exceptions=True)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._lifeline.close()

    def end_now(self) -> None:
        """End the first process, outside of an event loop."""
        self._first_process.end()
        self._lifeline.close()

    def _start(self) -> UserProcess:
        return UserProcess(
            self._name, self._settings, lifeline=self._lifeline, memory_limit=self._limits.memory
        )

    async def _usable_process(self) -> UserProcess:
        while self._process is None:
            if self._failure is not None:
                raise self._failure
            if self._opening is None:
                self._opening = asyncio.create_task(self._use(self._first_process))
            await asyncio.shield(self._opening)
        return self._process

    async def _use(self, process: UserProcess) -> None:
        """Make calls in this process from now on."""
        self._watch = ProcessWatch(
            process,
            self._calls,
            # Longer than a call takes with its cancellation: that names the call, silence does not
            max_silence_s=self._limits.timeout_s + 2 * (_GRACE_SECONDS + HEARTBEAT_SECONDS),
            end=lambda reason: self._lose(process, reason),
            warn=self._warn,
        )
        await process.connect(
            self._receive, self._perform, lambda reason: self._bury(process, reason)
        )
        self._process = process
        self._watch.start()
        if self._lost_process is not None and self._lost_process[0] is process:
            self._bury(*self._lost_process)

    async def _make(self, process: UserProcess, call: RunningCall) -> Outcome[Any] | None:
        """Make a call in the process. Returns None if it has to be made again."""
        self._calls[call.number] = call
        process.send(call.attempt.message(call.number))
        try:
            await call.attempt.limit.wait(call.end)
            if not call.end.done():
                return await self._cancel(process, call)
            return call.end.result()
        except asyncio.CancelledError:
            self._keep(asyncio.create_task(self._cancel(process, call)))
            raise

    async def _cancel(self, process: UserProcess, call: RunningCall) -> Outcome[Any] | None:
        """Cancel a call, and end its process if it goes on."""
        process.send(CancelCall(call.number))
        call.cancel_time = time.monotonic()
        while not call.end.done():
            await asyncio.wait({call.end}, timeout=_GRACE_SECONDS)
            if call.end.done():
                break
            blocker = self._blocker(process)
            if blocker is None or blocker is call:
                text = f"a call ignored its cancellation for {_GRACE_SECONDS:g} s"
                culprits = [call] if blocker is call else self._calls_to_blame(call)
                self._lose(process, text, culprits, ending=Ending.ABANDONED)
        outcome = call.end.result()
        if outcome is None or isinstance(outcome.error, UserProcessEnded):
            return outcome
        return Outcome(Ending.TIMED_OUT, error=outcome.error)

    def _blocker(self, process: UserProcess) -> RunningCall | None:
        """Return the call that has kept the event loop of the process from running."""
        if self._watch is None or self._watch.silence_seconds < _GRACE_SECONDS / 2:
            return None
        return self._calls.get(process.current.get())

    def _calls_to_blame(self, call: RunningCall) -> list[RunningCall]:
        """Return this call, and all others that have ignored a cancellation for about as long."""
        latest = time.monotonic() - 0.8 * _GRACE_SECONDS
        return [
            other
            for other in self._calls.values()
            if other is call or (other.cancel_time is not None and other.cancel_time <= latest)
        ]

    def _receive(self, message: FromProcess) -> None:
        assert self._watch is not None
        self._watch.hear()
        number = getattr(message, "call", 0)
        call = self._calls.get(number)
        if call is None:
            return
        match message:
            case CallStart():
                call.has_started = True
                call.attempt.limit.restart()
            case VerdictOfCall():
                self._settle(call, Outcome(Ending.RETURNED, value=message.verdict))
            case CallEnd():
                ending = Ending.CANCELLED if message.is_cancelled else Ending.RETURNED
                self._settle(call, Outcome(ending))
            case CallError():
                error = call.attempt.error_of(message.action)
                error = error or UserCodeError(message.description, message.trace)
                self._settle(call, Outcome(Ending.RAISED, error=error))
            case RespondAction():
                call.attempt.respond(message, self._answer)

    def _answer(self, state: EpisodeState) -> None:
        if self._process is not None:
            self._process.send(state)

    def _perform(self, action: QuickAction) -> EpisodeState | None:
        call = self._calls.get(action.call)
        return None if call is None else call.attempt.perform(action)

    def _settle(self, call: RunningCall, outcome: Outcome[Any] | None) -> None:
        self._calls.pop(call.number, None)
        call.attempt.close()
        if not call.end.done():
            call.end.set_result(outcome)

    def _bury(self, process: UserProcess, reason: str) -> None:
        """Replace a process whose connection has ended, perhaps before its first call."""
        self._lost_process = (process, reason)
        self._lose(process, reason, waits_for_exit=True)

    def _lose(
        self,
        process: UserProcess,
        reason: str,
        culprits: Sequence[RunningCall] = (),
        *,
        ending: Ending = Ending.RAISED,
        waits_for_exit: bool = False,
    ) -> None:
        """End a process and replace it.

        culprits: the calls at fault, if they are known. ending: of these calls.
        """
        if process is not self._process or self._is_closed:
            return
        assert self._watch is not None
        self._watch.stop()
        self._process = None
        culprits = culprits or self._suspects(process)
        replacement = self._replace(process, reason, culprits, ending, waits_for_exit)
        self._opening = asyncio.create_task(replacement)

    def _suspects(self, process: UserProcess) -> list[RunningCall]:
        """Return the call whose code ran last, or the only one. Nothing if neither is known."""
        current = self._calls.get(process.current.get())
        if current is not None:
            return [current]
        calls = [call for call in self._calls.values() if call.has_started]
        return calls if len(calls) == 1 else []

    async def _replace(
        self,
        process: UserProcess,
        reason: str,
        culprits: Sequence[RunningCall],
        ending: Ending,
        waits_for_exit: bool,
    ) -> None:
        if waits_for_exit:
            exit_text = await asyncio.to_thread(process.wait_for_exit)
            reason = f"{reason} ({exit_text})"
        process.request_end()
        process.disconnect()
        self._keep(asyncio.create_task(asyncio.to_thread(process.end)))
        self._count(reason, culprits)
        if self._failure is not None:
            self._fail_calls(self._failure)
            return
        for call in list(self._calls.values()):
            if call in culprits:
                error = UserProcessEnded(f"{self._name}: its process was ended: {reason}")
                self._settle(call, Outcome(ending, error=error))
            else:
                call.is_blameless = bool(culprits) or not call.has_started
                self._settle(call, None)
        await self._open_next()

    def _fail_calls(self, failure: PluginError) -> None:
        for call in list(self._calls.values()):
            del self._calls[call.number]
            call.attempt.close()
            if not call.end.done():
                call.end.set_exception(failure)

    async def _open_next(self) -> None:
        process = self._start()
        try:
            await asyncio.to_thread(self._wait_for, process)
            await self._use(process)
        except BaseException as error:
            self._keep(asyncio.create_task(asyncio.to_thread(process.end)))
            if not isinstance(error, PluginError):
                raise
            self._failure = self._failure or error

    def _wait_for(self, process: UserProcess) -> None:
        process.wait_until_open(
            self._limits.open_timeout_s, _log.warning, is_unwanted=lambda: self._is_closed
        )

    def _count(self, reason: str, culprits: Sequence[RunningCall]) -> None:
        """Count abandoned calls and warn. Sets the failure after too many of them.

        An end without a known culprit counts as one call.
        """
        subjects = [call.subject for call in culprits] or ["no call is known to be at fault"]
        now = time.monotonic()
        for subject in subjects:
            self._num_ends += 1
            self._ends.append(now)
            # The 1st, 2nd, 4th, 8th, ... The log of the collector names them all.
            self._warn(
                f"{self._name}: {reason}; its process was killed and is replaced "
                f"({subject}; number {self._num_ends})",
                to_rank_0=self._num_ends.bit_count() == 1,
            )
        while now - self._ends[0] > _WINDOW_SECONDS:
            self._ends.popleft()
        if len(self._ends) > self._limits.max_abandoned:
            self._failure = TooManyAbandoned(
                f"{self._name}: {len(self._ends)} calls within an hour had to be ended with their "
                f"process on one node, the last because {reason} ({subjects[-1]}); "
                f"rollout.max_abandoned_calls={self._limits.max_abandoned} is the largest number. "
                "Let a call end when it is cancelled: catch Exception, not BaseException, around "
                "what it awaits. Move work that blocks to a child process"
            )

    def _warn(self, text: str, *, to_rank_0: bool = True) -> None:
        _log.warning("%s", text)
        if self._report is not None and to_rank_0:
            self._keep(asyncio.ensure_future(self._report(text)))

    def _keep(self, task: asyncio.Future[Any]) -> None:
        """Hold a task until it has ended."""
        self._tasks.add(task)  # type: ignore[arg-type]
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Future[Any]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            error = task.exception()
            if error is not None:
                _log.warning("%s: %s: %s", self._name, type(error).__name__, error)


def _failure(text: str) -> Outcome[Any]:
    return Outcome(Ending.RAISED, error=UserProcessEnded(text))
