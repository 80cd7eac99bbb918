"""Runs the calls of one user-defined class in this process."""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import os
import socket
import sys
import time
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from megatron_rl.contracts.plugins import hide_values
from megatron_rl.environments.environment import Environment
from megatron_rl.rewards import Scorer
from megatron_rl.rewards.runner import (
    MAX_REASON_LENGTH,
    describe_failure,
    make_encodable,
    make_verdict,
)
from megatron_rl.rewards.user_calls import Ending, await_call
from megatron_rl.rollouts.user_process.current_call import CALL, CurrentCall, make_task_factory
from megatron_rl.rollouts.user_process.frames import FrameConnection
from megatron_rl.rollouts.user_process.messages import (
    HEARTBEAT_SECONDS,
    CallEnd,
    CallError,
    CancelCall,
    EpisodeState,
    FromProcess,
    Heartbeat,
    OpenClass,
    PlayCall,
    ScoreCall,
    ToProcess,
    VerdictOfCall,
)
from megatron_rl.rollouts.user_process.remote_episode import QuickActions, RemoteEpisode

# A loop that is blocked for so long writes the stacks of all threads to the log.
_STACK_SECONDS = 10.0
_MAX_TRACE_LENGTH = 20_000

# Between two looks at the clocks of the calls
_TICK_SECONDS = 0.1
# A look counts so much at most. A process that was stopped or had no CPU costs no call its time.
_MAX_COUNTED_SECONDS = 1.0

_decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)


@dataclass(eq=False)
class _RunningCall:
    """A call that runs in this process.

    episode: of a call of an environment. seconds: how long it has run without waiting for the
    model, and from its cancellation on, how long it has gone on.
    """

    task: asyncio.Task[FromProcess]
    episode: RemoteEpisode | None = None
    seconds: float = 0.0
    is_cancelled: bool = False

    def count(self, seconds: float) -> None:
        """Count time of the event loop. A response has a deadline of its own."""
        is_paused = not self.is_cancelled and self.episode is not None and self.episode.is_waiting
        self.seconds = 0.0 if is_paused else self.seconds + seconds

    def cancel(self) -> None:
        """Cancel the call."""
        if not self.is_cancelled:
            self.is_cancelled = True
            self.seconds = 0.0
            self.close()
            self.task.cancel()

    def close(self) -> None:
        """Take no further action of the call."""
        if self.episode is not None:
            self.episode.close()


class UserClassServer:
    """Answers the collector's calls of one class until the connection ends.

    Moves of a call, and why:

    running   -> ended      Its code returns or raises. It reports the result.
    running   -> cancelled  It is over its time, or the collector cancels it. The clock stands still
                            with the event loop, so a stall is no call's fault.
    cancelled -> ended      Its code ends. It is reported as over its time, whatever it returns.
    cancelled -> ignored    It goes on for the grace while the event loop runs: only its own code
                            can be the reason. It is reported, and its task is left alone.

    A call that blocks the event loop makes no move. The collector hears nothing and ends the
    process.

    scorer, environment: the class. One of them is None.
    """

    def __init__(
        self,
        settings: OpenClass,
        *,
        scorer: Scorer | None,
        environment: Environment | None,
        current: CurrentCall,
        quick_actions: QuickActions,
    ) -> None:
        self._settings = settings
        self._scorer = scorer
        self._environment = environment
        self._current = current
        self._quick_actions = quick_actions
        self._calls: dict[int, _RunningCall] = {}

    async def serve(self, connection: socket.socket) -> None:
        """Answer calls until the collector closes the connection."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(make_task_factory(self._current))
        self._end = loop.create_future()
        self._connection = await FrameConnection.open(connection, self._receive, self._stop)
        self._beat()
        self._tick(time.monotonic())
        await self._end

    def _stop(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _send(self, message: FromProcess) -> None:
        self._connection.send(message)

    def _beat(self) -> None:
        seconds = {number: call.seconds for number, call in self._calls.items()}
        slowest = max(seconds, key=seconds.__getitem__, default=0)
        self._send(Heartbeat(slowest, seconds.get(slowest, 0.0)))
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(_STACK_SECONDS, file=sys.__stderr__)
        asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)

    def _tick(self, last: float) -> None:
        """Count the time of all calls, and end those that are over their limits."""
        now = time.monotonic()
        for number, call in list(self._calls.items()):
            call.count(min(now - last, _MAX_COUNTED_SECONDS))
            if call.is_cancelled and call.seconds >= self._settings.grace_s:
                del self._calls[number]
                self._send(CallEnd(number, Ending.IGNORED))
            elif not call.is_cancelled and call.seconds >= self._settings.section.timeout_s:
                call.cancel()
        asyncio.get_running_loop().call_later(_TICK_SECONDS, self._tick, now)

    def _receive(self, body: bytes) -> None:
        message = _decoder.decode(body)
        match message:
            case ScoreCall():
                self._start(message.call, self._score(message))
            case PlayCall():
                episode = RemoteEpisode(
                    message.call, message.prompt, self._send, self._quick_actions
                )
                self._start(message.call, self._play(message.call, episode), episode)
            case CancelCall(call):
                if call in self._calls:
                    self._calls[call].cancel()
            case EpisodeState():
                running = self._calls.get(message.call)
                if running is not None and running.episode is not None:
                    running.episode.receive(message)

    def _start(
        self,
        number: int,
        work: Coroutine[Any, Any, FromProcess],
        episode: RemoteEpisode | None = None,
    ) -> None:
        context = contextvars.copy_context()
        context.run(CALL.set, number)
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._calls[number] = _RunningCall(task, episode)
        task.add_done_callback(lambda task: self._finish(number, task))

    def _finish(self, number: int, task: asyncio.Task[FromProcess]) -> None:
        """Report the end of a call, unless it was reported as a call that goes on."""
        error = None if task.cancelled() else task.exception()
        call = self._calls.pop(number, None)
        if call is None:
            return
        call.close()
        if call.is_cancelled or task.cancelled():
            is_over = call.is_cancelled
            self._send(CallEnd(number, Ending.TIMED_OUT if is_over else Ending.CANCELLED))
        else:
            self._send(task.result() if error is None else self._describe(number, error))

    async def _score(self, message: ScoreCall) -> FromProcess:
        assert self._scorer is not None
        call = partial(self._scorer.score, message.prompt, message.text, message.finish_reason)
        outcome = await await_call(call)
        if outcome.ending is Ending.CANCELLED:
            return CallEnd(message.call, Ending.CANCELLED)
        return VerdictOfCall(message.call, make_verdict(outcome, self._hide_values))

    async def _play(self, call: int, episode: RemoteEpisode) -> FromProcess:
        assert self._environment is not None
        play = partial(self._environment.play, episode)  # type: ignore[arg-type]
        outcome = await await_call(play)
        if outcome.ending is Ending.RAISED and outcome.error is not None:
            return self._describe(call, outcome.error, episode.action_of(outcome.error))
        return CallEnd(call, outcome.ending)

    def _describe(self, call: int, error: BaseException, action: int = 0) -> CallError:
        description = self._hide_values(describe_failure(error))
        trace = self._hide_values("".join(traceback.format_exception(error)))
        return CallError(
            call=call,
            description=make_encodable(description, MAX_REASON_LENGTH),
            trace=make_encodable(trace[-_MAX_TRACE_LENGTH:], _MAX_TRACE_LENGTH),
            action=action,
        )

    def _hide_values(self, text: str) -> str:
        return hide_values(text, self._settings.section.options)


def offer_to_the_kernel() -> None:
    """Let the kernel kill this process first if the machine runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError as error:
        print(f"process {os.getpid()}: oom_score_adj cannot be set: {error}", file=sys.stderr)
