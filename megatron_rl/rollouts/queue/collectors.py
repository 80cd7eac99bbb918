"""The collectors of all nodes, as rank 0 wants them to be."""

from __future__ import annotations

import math
from collections.abc import Mapping

from megatron_rl.rollouts.queue.engine_roster import EngineRoster
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import (
    Configure,
    Serve,
    Stop,
    ToCollector,
    slots_of_engine,
)
from sglang_bridge.engine import Engine


class Collectors:
    """The collectors of all nodes, as rank 0 wants them to be.

    Each of them gets the whole state whenever some of it changes. A collector that connects, also
    the one that replaces another, gets its configuration and the latest state.

    hub: exchanges the messages. number: of the last state.
    epochs: by node, of the collector that is connected and configured.
    """

    def __init__(self, hub: CollectorHub, roster: EngineRoster) -> None:
        self.hub = hub
        self._roster = roster
        self._configurations: Mapping[int, Configure] = {}
        self._version: int | None = None
        self._is_paused = False
        self.number = 0
        self.epochs: dict[int, int] = {}

    def configure(self, configurations: Mapping[int, Configure]) -> None:
        """Set the configuration of each node's collector, also for later connections."""
        self._configurations = configurations

    def slots_per_engine(self, node: int) -> float:
        """Return how many requests an engine of a node may have, infinite if that is unknown."""
        if node not in self._configurations:
            return math.inf
        return slots_of_engine(self._configurations[node].engine.max_running_requests)

    def set_version(self, version: int) -> None:
        """Set the version of the weights whose responses are used."""
        self._version = version
        self.send_state()

    def set_paused(self, is_paused: bool) -> None:
        """Let collectors send no request to an engine, or let them go on."""
        self._is_paused = is_paused
        self.send_state()

    def send_state(self) -> None:
        """Send the state to all collectors."""
        self.number += 1
        nodes = self.hub.nodes
        limited_nodes = [node for node in nodes if self._roster.is_limited(node)]
        # Lazily: a send that fails receives messages, and another collector may have connected then
        others = (node for node in nodes if node not in limited_nodes and self._is_configured(node))
        self.hub.send_to_each(others, self._state(self._roster.engines))
        for node in limited_nodes:
            self._send_state_to(node)

    def send_state_to(self, node: int) -> None:
        """Send the state to the collector of a node, whose engines have changed."""
        self.number += 1
        self._send_state_to(node)

    def _send_state_to(self, node: int) -> None:
        self.send(node, self._state(self._roster.engines_for(node)))

    def _state(self, engines: tuple[Engine, ...]) -> Serve:
        """Return the state of the nodes that can use these engines."""
        return Serve(
            number=self.number,
            engines=engines,
            version=self._version,
            is_paused=self._is_paused,
        )

    def send(self, node: int, message: ToCollector) -> None:
        """Send a message. A collector that is not configured yet gets what it needs then."""
        if self._is_configured(node):
            self.hub.send(node, message)

    def welcome(self, node: int, epoch: int) -> None:
        """Configure a collector that has connected, and send it the state."""
        self.epochs[node] = epoch
        if node in self._configurations:
            self.send(node, self._configurations[node])
        if self.number:
            self._send_state_to(node)

    def forget(self, node: int, epoch: int) -> None:
        """Forget a collector that is gone, unless another one has replaced it."""
        if self.epochs.get(node) == epoch:
            del self.epochs[node]

    @property
    def connected_nodes(self) -> list[int]:
        """The nodes whose collectors are connected and configured."""
        return [node for node in self.hub.nodes if self._is_configured(node)]

    def _is_configured(self, node: int) -> bool:
        """Return False for a collector whose connection was not handled yet."""
        return node in self.epochs and self.epochs[node] == self.hub.epoch(node)

    def stop(self) -> None:
        """End every collector."""
        self.hub.send_to_each(self.hub.nodes, Stop())
