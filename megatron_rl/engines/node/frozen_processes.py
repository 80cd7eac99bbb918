"""Detects processes that are stopped (SIGSTOP): they are alive and never answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from sglang_bridge.server.process_table import descendants, is_stopped

_LIMIT_SECONDS = 7.0
_MAX_SECONDS_PER_CHECK = 2.0


class ProcessFrozen(Failure):
    """A process was stopped and not continued.

    pids: of the processes that are stopped.
    """

    exit_code = ExitCode.ENGINE_FAILED

    def __init__(self, text: str, pids: Sequence[int]) -> None:
        super().__init__(text)
        self.pids = pids


class FrozenProcesses:
    """Measures how long processes have been stopped, over repeated checks.

    Each check counts two seconds at most. So a whole job that was suspended survives.

    limit_seconds: the time after which a stopped process is an error.
    generations: of descendants that are checked too. None: all.
    """

    def __init__(
        self,
        limit_seconds: float = _LIMIT_SECONDS,
        *,
        generations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._generations = generations
        self._clock = clock
        self._last_check = clock()
        self._seconds: dict[str, float] = {}

    def check(self, roots: Mapping[str, int]) -> None:
        """Look for stopped processes. Raises `ProcessFrozen`.

        roots: by name, the process id of each process.
        """
        now = self._clock()
        interval = min(now - self._last_check, _MAX_SECONDS_PER_CHECK)
        self._last_check = now
        for name, root in roots.items():
            family = (root, *descendants(root, self._generations))
            pids = [pid for pid in family if is_stopped(pid)]
            self._seconds[name] = self._seconds.get(name, 0.0) + interval if pids else 0.0
            if self._seconds[name] > self._limit_seconds:
                raise ProcessFrozen(
                    f"{name} was stopped (SIGSTOP) and not continued for "
                    f"{self._limit_seconds:.0f} s: process {', '.join(map(str, pids))}",
                    pids,
                )
