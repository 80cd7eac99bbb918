"""The time in which engines have nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


class IdleTime:
    """Adds up the seconds in which engines work on no request, as a mean over the engines.

    Without an engine nothing is idle.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since = clock()
        self._share = 0.0  # of the engines that are idle
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """The idle seconds so far."""
        return self._seconds + self._share * (self._clock() - self._since)

    def note(self, num_idle: int, num_engines: int) -> None:
        """Note how many engines are idle from now on."""
        self._seconds = self.seconds
        self._since = self._clock()
        self._share = num_idle / num_engines if num_engines else 0.0


class IdleEngines:
    """The idle seconds that collectors have reported, each from its start on."""

    def __init__(self) -> None:
        # By node and epoch: now, and at the last call of `take`
        self._seconds: dict[tuple[int, int], float] = {}
        self._last_seconds: dict[tuple[int, int], float] = {}

    def note(self, node: int, epoch: int, seconds: float) -> None:
        """Note the report of a node's collector. epoch: counts its starts."""
        self._seconds[node, epoch] = seconds

    def take(self, epochs: Mapping[int, int]) -> float:
        """Return the seconds since the last call, as a mean over the nodes.

        epochs: by node, of the collectors that are connected.
        """
        total = sum(self._seconds.values())
        total -= sum(self._last_seconds.get(key, 0.0) for key in self._seconds)
        current_keys = set(epochs.items())
        self._seconds = {k: s for k, s in self._seconds.items() if k in current_keys}
        self._last_seconds = dict(self._seconds)
        return total / max(1, len(epochs))
