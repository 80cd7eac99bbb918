"""Processes that were stopped and are not continued: they live, and will never answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from sglang_bridge.server.process_table import descendants, is_stopped

_SECONDS = 7.0
_MOST_SECONDS_A_LOOK = 2.0


class ProcessStopped(Failure):
    """A process of an engine or a collector was stopped from outside."""

    exit_code = ExitCode.ENGINE_FAILED


class FrozenProcesses:
    """Counts how long processes have been stopped, over repeated looks. `seconds`: when they are
    given up.

    Time in which nobody looked does not count: a whole job that was suspended goes on when it is
    continued.
    """

    def __init__(
        self, seconds: float = _SECONDS, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._clock = clock
        self._last = clock()
        self._stopped: dict[str, float] = {}

    def look(self, roots: Mapping[str, int]) -> None:
        """roots: the topmost process of each thing by its name. Raises `ProcessStopped`."""
        now = self._clock()
        elapsed, self._last = min(now - self._last, _MOST_SECONDS_A_LOOK), now
        for name, root in roots.items():
            stopped = _stopped([root, *descendants(root)])
            self._stopped[name] = self._stopped.get(name, 0.0) + elapsed if stopped else 0.0
            if self._stopped[name] > self._seconds:
                raise ProcessStopped(
                    f"{name} was stopped (SIGSTOP) and not continued for {self._seconds:.0f} s: "
                    f"process {', '.join(map(str, stopped))}"
                )


def _stopped(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if is_stopped(pid)]
