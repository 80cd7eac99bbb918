"""Runs the calls of one user-defined class in this process."""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import os
import socket
import sys
import traceback
from collections.abc import Coroutine
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
    CallStart,
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

_decoder: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)


class UserClassServer:
    """Answers the collector's calls of one class until the connection ends.

    scorer, environment: the class. One of them is None.
    options: its constructor's arguments. Their secret values are left out of texts.
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
        section = settings.reward or settings.environment
        self._options = {} if section is None else section.options
        self._scorer = scorer
        self._environment = environment
        self._current = current
        self._quick_actions = quick_actions
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._episodes: dict[int, RemoteEpisode] = {}

    async def serve(self, connection: socket.socket) -> None:
        """Answer calls until the collector closes the connection."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(make_task_factory(self._current))
        self._end = loop.create_future()
        self._connection = await FrameConnection.open(connection, self._receive, self._stop)
        self._beat()
        await self._end

    def _stop(self, reason: str) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _send(self, message: FromProcess) -> None:
        self._connection.send(message)

    def _beat(self) -> None:
        self._send(Heartbeat())
        if sys.__stderr__ is not None:
            faulthandler.dump_traceback_later(_STACK_SECONDS, file=sys.__stderr__)
        asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS, self._beat)

    def _receive(self, body: bytes) -> None:
        message = _decoder.decode(body)
        match message:
            case ScoreCall():
                self._start(message.call, self._score(message))
            case PlayCall():
                self._start(message.call, self._play(message))
            case CancelCall(call):
                if call in self._tasks:
                    self._tasks[call].cancel()
            case EpisodeState():
                if message.call in self._episodes:
                    self._episodes[message.call].receive(message)

    def _start(self, call: int, work: Coroutine[Any, Any, None]) -> None:
        context = contextvars.copy_context()
        context.run(CALL.set, call)
        task = asyncio.get_running_loop().create_task(work, context=context)
        self._tasks[call] = task
        task.add_done_callback(lambda task: self._finish(call, task))

    def _finish(self, call: int, task: asyncio.Task[None]) -> None:
        """Report a call that has not reported its end: one that was cancelled before it began."""
        del self._tasks[call]
        if task.cancelled():
            self._send(CallEnd(call, is_cancelled=True))
        elif (error := task.exception()) is not None:
            self._send(self._describe(call, error))

    async def _score(self, message: ScoreCall) -> None:
        self._send(CallStart(message.call))
        assert self._scorer is not None
        call = partial(self._scorer.score, message.prompt, message.text, message.finish_reason)
        outcome = await await_call(call)
        if outcome.ending is Ending.CANCELLED:
            self._send(CallEnd(message.call, is_cancelled=True))
        else:
            self._send(VerdictOfCall(message.call, make_verdict(outcome, self._hide_values)))

    async def _play(self, message: PlayCall) -> None:
        self._send(CallStart(message.call))
        assert self._environment is not None
        episode = RemoteEpisode(message.call, message.prompt, self._send, self._quick_actions)
        self._episodes[message.call] = episode
        try:
            play = partial(self._environment.play, episode)  # type: ignore[arg-type]
            outcome = await await_call(play)
        finally:
            del self._episodes[message.call]
        if outcome.error is None or outcome.ending is Ending.CANCELLED:
            self._send(CallEnd(message.call, is_cancelled=outcome.ending is Ending.CANCELLED))
        else:
            action = episode.action_of(outcome.error)
            self._send(self._describe(message.call, outcome.error, action))

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
        return hide_values(text, self._options)


def offer_to_the_kernel() -> None:
    """Let the kernel kill this process first if the machine runs out of memory."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError as error:
        print(f"process {os.getpid()}: oom_score_adj cannot be set: {error}", file=sys.stderr)
