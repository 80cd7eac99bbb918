"""The time in which engines have nothing to do, as collectors report it."""

from __future__ import annotations

from collections.abc import Mapping


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
