"""Keeps calls away from a server that does not answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

# Attempts without an answer, one after the other
BREAK_AFTER = 5
_FIRST_PAUSE = 0.5  # seconds
LONGEST_PAUSE = 30.0
# Seconds. A shorter wait is not worth a message.
WARN_AFTER = 10.0

_log = logging.getLogger(__name__)


class NoAnswer(Exception):
    """The server cannot be reached, or gave no answer in time."""


class Circuit:
    """Decides when an attempt may go to a server. Its moves, and why:

    closed -> open     `BREAK_AFTER` attempts in a row had no answer. The server is gone or has too
                       much to do, and further attempts would only load it.
    open   -> open     One attempt at a time goes out, after a pause that doubles each time.
    open   -> closed   The server has answered. All attempts go out again.

    name: of the server, for messages. patience_s: seconds for which attempts wait while it is open.
    Then they fail at once, apart from one each `LONGEST_PAUSE` seconds.
    warn: gets a message when attempts have waited for a while, and when the server answers again.
    By default it goes to the log.
    """

    def __init__(self, name: str, *, patience_s: float) -> None:
        self._name = name
        self._patience_s = patience_s
        self.warn: Callable[[str], None] = _log.warning
        self._num_failures = 0  # in a row
        self._last_attempt = 0.0
        self._opening_time: float | None = None
        self._next_pause = _FIRST_PAUSE
        self._has_warned = False
        self._turn = asyncio.Lock()

    @property
    def is_open(self) -> bool:
        """Return True while attempts have to wait."""
        return self._opening_time is not None

    async def run[T](self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make an attempt once it may go out, and again while the server answers nothing.

        Raises `NoAnswer`, and what the attempt raises.
        """
        while self.is_open:
            async with self._turn:
                if not self.is_open:
                    break
                await self._pause()
                # Without an answer, the next in line tries: this request may be the reason
                with contextlib.suppress(NoAnswer):
                    return await self._try(attempt)
        return await self._try(attempt)

    async def _try[T](self, attempt: Callable[[], Awaitable[T]]) -> T:
        self._last_attempt = time.monotonic()
        try:
            result = await attempt()
        except NoAnswer as error:
            self._note_failure(error)
            raise
        except Exception:
            self._note_answer()  # one that cannot be used
            raise
        self._note_answer()
        return result

    async def _pause(self) -> None:
        """Wait before the next attempt. Raises `NoAnswer` if attempts have waited for too long."""
        assert self._opening_time is not None
        waited = time.monotonic() - self._opening_time
        since_attempt = time.monotonic() - self._last_attempt
        if waited > self._patience_s and since_attempt < LONGEST_PAUSE:
            raise NoAnswer(f"{self._name} has not answered for {waited:.0f} s")
        pause = min(self._next_pause, LONGEST_PAUSE)
        self._next_pause = 2 * pause
        await asyncio.sleep(max(0.0, pause - since_attempt))

    def _note_failure(self, error: NoAnswer) -> None:
        self._num_failures += 1
        if self._num_failures < BREAK_AFTER:
            return
        if self._opening_time is None:
            self._opening_time = time.monotonic()
            self._next_pause = _FIRST_PAUSE
        waited = time.monotonic() - self._opening_time
        if waited > WARN_AFTER and not self._has_warned:
            self._has_warned = True
            self.warn(
                f"{self._name} does not answer ({error}). Responses wait for their rewards, for at "
                f"most {self._patience_s:g} s: start it again"
            )

    def _note_answer(self) -> None:
        if self._has_warned:
            self.warn(f"{self._name} answers again")
        self._num_failures = 0
        self._opening_time = None
        self._has_warned = False
