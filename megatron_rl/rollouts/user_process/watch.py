"""Watches one process of a user-defined class: its silence, and slow calls."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from megatron_rl.records.reminder import FIRST_SECONDS
from megatron_rl.rollouts.user_process.attempts import RunningCall
from megatron_rl.rollouts.user_process.messages import FromProcess, Heartbeat
from megatron_rl.rollouts.user_process.process import UserProcess

_CHECK_SECONDS = 0.25
# The shortest times between lines about slow calls: in the log of the collector, and for rank 0
_LOG_SECONDS = 60.0
_REPORT_SECONDS = 600.0


class Warn(Protocol):
    """Writes a warning to the log, and sends it to rank 0 if it has to."""

    def __call__(self, text: str, *, to_rank_0: bool = True) -> None: ...


class ProcessWatch:
    """Ends a process that is silent for too long, and names slow calls.

    calls: calls that the process has, by number. max_silence_s: seconds without a message.
    end: ends the process, given the reason.
    """

    def __init__(
        self,
        process: UserProcess,
        calls: Mapping[int, RunningCall],
        *,
        max_silence_s: float,
        end: Callable[[str], None],
        warn: Warn,
    ) -> None:
        self.silence_seconds = 0.0
        self.slowest = Heartbeat()
        self._process = process
        self._calls = calls
        self._max_silence_s = max_silence_s
        self._end = end
        self._warn = warn
        self._task: asyncio.Task[None] | None = None
        self._last_check: float | None = None
        self._named_call = 0
        self._next_line = FIRST_SECONDS
        self._last_log = self._last_report = -math.inf

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._work())

    def stop(self) -> None:
        """End watching."""
        if self._task is not None:
            self._task.cancel()

    def hear(self, message: FromProcess) -> None:
        """Note that the process has sent a message."""
        self.silence_seconds = 0.0
        if isinstance(message, Heartbeat):
            self.slowest = message

    def check(self, now: float) -> bool:
        """Look at the process once. Call it a few times a second.

        now: `time.monotonic()`. Returns False once the process is ended.
        """
        # While this process itself was suspended, it could hear nothing.
        if self._last_check is not None:
            self.silence_seconds += min(now - self._last_check, 2 * _CHECK_SECONDS)
        self._last_check = now
        if self.silence_seconds > self._max_silence_s:
            self._end(f"it answered nothing for {self.silence_seconds:.0f} s")
            return False
        self._name_slow_calls(now)
        return True

    async def _work(self) -> None:
        while self.check(time.monotonic()):
            await asyncio.sleep(_CHECK_SECONDS)

    def _name_slow_calls(self, now: float) -> None:
        """Say at growing intervals for which call everything waits."""
        longest = max(self.slowest.seconds, self.silence_seconds)
        if longest < FIRST_SECONDS or self.slowest.slowest_call != self._named_call:
            self._named_call = self.slowest.slowest_call
            self._next_line = FIRST_SECONDS
        if longest < FIRST_SECONDS:
            return
        is_first = self._next_line == FIRST_SECONDS
        if longest < self._next_line or (is_first and now - self._last_log < _LOG_SECONDS):
            return
        self._next_line = longest + min(longest, _REPORT_SECONDS)
        self._last_log = now
        is_silent = self.silence_seconds >= FIRST_SECONDS
        text = self._describe_silence() if is_silent else self._describe_slowest()
        is_due = is_silent or now - self._last_report >= _REPORT_SECONDS
        if is_due:
            self._last_report = now
        self._warn(
            f"{self._process.name}: {text}; {len(self._calls)} calls run or wait", to_rank_0=is_due
        )

    def _describe_silence(self) -> str:
        running = self._calls.get(self._process.current.get())
        subject = "" if running is None else f", in which {running.subject} runs,"
        return f"its process{subject} answers nothing for {self.silence_seconds:.0f} s"

    def _describe_slowest(self) -> str:
        call = self._calls.get(self.slowest.slowest_call)
        return f"{'a call' if call is None else call.subject} takes {self.slowest.seconds:.0f} s"
