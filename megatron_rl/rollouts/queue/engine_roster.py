"""The engines that serve, and which collectors can use them, as rank 0 knows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from sglang_bridge.engine import Engine


class EngineRoster:
    """The engines that serve, and which of them some collectors cannot reach.

    Every collector knows the engines of all nodes and prefers its own. It uses others while its
    node has none.

    left_out: URLs of engines that failed, until they leave or are added again.
    """

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}  # by URL
        self._own_engines: dict[int, list[Engine]] = {}  # by node that has some
        # The node of a collector, and an engine of another node that failed for it
        self._unreachable: set[tuple[int, str]] = set()
        self.left_out: set[str] = set()

    def set_engines(self, engines: Iterable[Engine]) -> None:
        """Replace the engines. New ones can be reached as far as is known."""
        new_engines = {engine.url: engine for engine in engines}
        unchanged_urls = {
            url for url, engine in new_engines.items() if self._engines.get(url) == engine
        }
        self._unreachable = {pair for pair in self._unreachable if pair[1] in unchanged_urls}
        self.left_out &= unchanged_urls
        self._engines = new_engines
        self._own_engines = {}
        for engine in new_engines.values():
            self._own_engines.setdefault(engine.node, []).append(engine)

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The engines of all nodes that serve."""
        return tuple(self._engines.values())

    def find(self, url: str) -> Engine | None:
        """Return the engine with this URL, None if none serves."""
        return self._engines.get(url)

    def engines_for(self, node: int) -> tuple[Engine, ...]:
        """Return the engines that a node's collector can use, its own and others."""
        if not self.is_limited(node):
            return self.engines
        return tuple(engine for engine in self.engines if self.can_use(node, engine))

    def is_limited(self, node: int) -> bool:
        """Return True if some engine of another node failed for a node's collector."""
        return any(node == limited_node for limited_node, _ in self._unreachable)

    def can_use(self, node: int, engine: Engine) -> bool:
        """Return False if an engine of another node failed for a node's collector."""
        return (node, engine.url) not in self._unreachable

    def mark_unreachable(self, node: int, engine: Engine) -> None:
        """Keep an engine of another node from a collector, until failures are forgotten."""
        self._unreachable.add((node, engine.url))

    def forget_failures(self) -> bool:
        """Let collectors try all engines again. Returns True if there are some to try."""
        has_failures = bool(self._unreachable)
        self._unreachable.clear()
        return has_failures

    def choose_node(self, nodes: Sequence[int], loads: Counter[int]) -> int:
        """Return the node whose engines have the smallest load for each of their ranks.

        nodes: at least one node that may get a request. loads: rollouts that need an engine, by
        node.
        """

        def load(node: int) -> float:
            num_ranks = sum(engine.tp for engine in self._own_engines.get(node, ()))
            return loads[node] / max(num_ranks, 1)

        return min(nodes, key=lambda node: (load(node), node))

    def num_engines(self, node: int) -> int:
        """Return how many engines a node's collector sends requests to, at least 1.

        These are its own, or those of other nodes while it has none. An environment that needs no
        engine gets requests, too.
        """
        own_engines = self._own_engines.get(node, ())
        return self._count(own_engines) or self._count(self.engines_for(node)) or 1

    def _count(self, engines: Iterable[Engine]) -> int:
        """Return how many of these engines have not failed."""
        return sum(engine.url not in self.left_out for engine in engines)

    def nodes_to_request_from(self, nodes: Sequence[int]) -> list[int]:
        """Return the nodes that may get requests, of the given ones.

        These are the nodes that have engines. If there is none: nodes that can use other engines.
        If no node can use an engine, it returns all nodes: some environments need no engine.
        """
        own_nodes = [node for node in nodes if node in self._own_engines]
        return own_nodes or [node for node in nodes if self.engines_for(node)] or list(nodes)
