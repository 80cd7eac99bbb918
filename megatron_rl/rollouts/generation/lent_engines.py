"""Engines that collectors of other nodes use, as rank 0 knows them."""

from __future__ import annotations

from collections.abc import Iterable

from sglang_bridge.engine import Engine


class LentEngines:
    """Tracks which collectors use engines of other nodes.

    A collector has the responses that it has begun with. If its node loses its last engine, the
    engines of other nodes continue them.
    """

    def __init__(self) -> None:
        self._urls: dict[int, set[str]] = {}  # by node of the collector
        self._unusable_urls: dict[int, set[str]] = {}  # the same, of engines that failed for it

    def lend(self, node: int, engines: Iterable[Engine]) -> list[Engine]:
        """Lend engines to a node's collector. Returns those that it did not have."""
        lent_urls = self._urls.setdefault(node, set())
        known_urls = lent_urls | self._unusable_urls.get(node, set())
        new_engines = [engine for engine in engines if engine.url not in known_urls]
        lent_urls.update(engine.url for engine in new_engines)
        return new_engines

    def is_lent(self, node: int, url: str) -> bool:
        """Return True if a node's collector uses this engine of another node."""
        return url in self._urls.get(node, ())

    def take_back(self, node: int) -> list[str]:
        """Lend a node's collector nothing any more. Returns the URLs of what it had."""
        self._unusable_urls.pop(node, None)
        return sorted(self._urls.pop(node, ()))

    def take_back_unusable(self, node: int, url: str) -> None:
        """Do not lend an engine to a node's collector again, unless it is added again."""
        self._urls[node].discard(url)
        self._unusable_urls.setdefault(node, set()).add(url)

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
