"""The parts that accompany a rank from its first line to its last."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from megatron_rl.records.progress import Progress
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.stop_request import StopRequest
from megatron_rl.run.supervision.watchdog import Watchdog


class OpenParts:
    """Closes every part at the end of a run, and ends its processes first when the run fails."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._killers: list[Callable[[], None]] = []

    def enter[T](self, part: contextlib.AbstractContextManager[T]) -> T:
        """Enter a context; it is left when the parts are closed."""
        return self._stack.enter_context(part)

    def callback(self, close: Callable[[], object]) -> None:
        """Call `close` when the parts are closed."""
        self._stack.callback(close)

    def kill_on_failure(self, kill: Callable[[], None]) -> None:
        """Call `kill` before the parts are closed, when the run fails."""
        self._killers.append(kill)

    def close(self) -> None:
        """Close the parts of a complete run, in reverse order."""
        self._stack.close()

    def kill_processes(self) -> None:
        """Close the parts of a failed run: first end its processes, so that nothing waits for them.

        Other ranks notice that this process ends. A message could not reach one that is inside a
        collective.
        """
        for kill in reversed(self._killers):
            kill()
        self._stack.close()


@dataclass(frozen=True)
class Supervision:
    """Reports progress and the end of a run, watches it, and closes its parts.

    stop: a request to stop that leaves time to save; it is accepted once there is something to
    save.
    """

    ranks: LocalRanks
    progress: Progress
    reporter: ExitReporter
    watchdog: Watchdog
    stop: StopRequest
    parts: OpenParts
