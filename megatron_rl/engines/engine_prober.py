"""Asks engines in the background whether they answer, because one that hangs would block rank 0."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from sglang_bridge.engine import Engine
from sglang_bridge.errors import EngineError

_FIRST_PAUSE_SECONDS = 0.5
_LAST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True)
class ProbeResult:
    """The answer of an engine.

    problem: why it cannot serve, empty if it can. engine: with the sizes with which it runs, None
    if nothing is known about them.
    """

    name: str
    epoch: int
    problem: str
    engine: Engine | None = None


@dataclass
class _Probe:
    """The probes of one engine. epoch: of the probed server. due: the time of the next probe."""

    epoch: int
    due: float
    pause: float = _FIRST_PAUSE_SECONDS
    is_running: bool = False


class EngineProber:
    """Probes engines, each in a thread of its own.

    check: asks one engine, and returns it with the sizes with which it runs. Raises `EngineError`
    if it cannot serve. Any other exception is a problem of that engine, too.
    """

    def __init__(
        self, check: Callable[[Engine], Engine], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._check = check
        self._clock = clock
        self._probes: dict[str, _Probe] = {}
        self._results: queue.SimpleQueue[ProbeResult] = queue.SimpleQueue()

    def probe(self, name: str, epoch: int, engine: Engine) -> None:
        """Probe an engine if it is due. The pauses between its probes grow to ten seconds."""
        now = self._clock()
        probe = self._probes.get(name)
        if probe is None or probe.epoch != epoch:
            probe = _Probe(epoch, now)
            self._probes[name] = probe
        if probe.is_running or now < probe.due:
            return
        probe.is_running = True
        thread = threading.Thread(target=self._run, args=(name, probe, engine), daemon=True)
        thread.start()

    def forget(self, name: str) -> None:
        """Probe an engine without a pause the next time."""
        self._probes.pop(name, None)

    def results(self) -> list[ProbeResult]:
        """Return the answers since the last call."""
        results = []
        while not self._results.empty():
            results.append(self._results.get())
        return results

    def _run(self, name: str, probe: _Probe, engine: Engine) -> None:
        problem = ""
        try:
            engine = self._check(engine)
        except EngineError as error:
            problem = str(error)
        except Exception as error:  # a thread that ends without a result is waited for without end
            problem = f"{type(error).__name__}: {error}"
        probe.due = self._clock() + probe.pause
        probe.pause = min(2 * probe.pause, _LAST_PAUSE_SECONDS)
        probe.is_running = False
        self._results.put(ProbeResult(name, probe.epoch, problem, engine))
