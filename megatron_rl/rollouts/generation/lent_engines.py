"""Engines that collectors of other nodes use, as rank 0 knows them."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_bridge.engine import Engine


class LentEngines:
    """Tracks which collectors use engines of other nodes, and which of these they cannot use.

    A collector keeps the responses that it has started. If its node loses its last engine, the
    collector continues them on engines of other nodes.
    """

    def __init__(self) -> None:
        self._urls: dict[int, set[str]] = {}  # by node of the collector
        # By node of the collector: engines of other nodes that failed for it
        self._unusable_urls: dict[int, set[str]] = {}

    def lend(self, node: int, engines: Iterable[Engine]) -> list[Engine]:
        """Lend engines to a node's collector. Returns those that it did not have."""
        lent_urls = self._urls.setdefault(node, set())
        new_engines = [
            engine
            for engine in engines
            if engine.url not in lent_urls and self.is_usable(node, engine)
        ]
        lent_urls.update(engine.url for engine in new_engines)
        return new_engines

    def is_lent(self, node: int, url: str) -> bool:
        """Return True if a node's collector uses this engine of another node."""
        return url in self._urls.get(node, ())

    def is_usable(self, node: int, engine: Engine) -> bool:
        """Return False if an engine of another node failed for a node's collector."""
        return engine.node == node or engine.url not in self._unusable_urls.get(node, ())

    def take_back(self, node: int) -> list[str]:
        """Lend nothing to a node's collector any more. Returns the URLs of what it had."""
        return sorted(self._urls.pop(node, ()))

    def mark_unusable(self, node: int, url: str) -> None:
        """Do not lend an engine to a node's collector again, until failures are forgotten."""
        self._urls[node].discard(url)
        self._unusable_urls.setdefault(node, set()).add(url)

    def forget_failures(self) -> None:
        """Let collectors try all engines again."""
        self._unusable_urls.clear()

    def remove_engine(self, url: str) -> list[int]:
        """Lend an engine to nobody. Returns the nodes whose collectors used it."""
        for urls in self._unusable_urls.values():
            urls.discard(url)
        nodes = [node for node, urls in self._urls.items() if url in urls]
        for node in nodes:
            self._urls[node].discard(url)
        return nodes

    @property
    def nodes(self) -> list[int]:
        """The nodes whose collectors use engines of other nodes."""
        return [node for node, urls in self._urls.items() if urls]
