"""The state that rank 0 sends to collectors."""

from collections.abc import Iterable
from typing import Any

from megatron_rl.rollouts.queue.collectors import Collectors
from megatron_rl.rollouts.queue.engine_roster import EngineRoster
from megatron_rl.rollouts.wire.messages import Configure, Serve, ToCollector
from sglang_bridge.engine import Engine
from tests.support.fake_engine import configuration

ENGINES = [Engine(url="http://a", node=0), Engine(url="http://b", node=1)]


class Hub:
    """Notes what is sent. on_send: called with the node after each message."""

    def __init__(self, num_nodes: int) -> None:
        self.epochs = dict.fromkeys(range(num_nodes), 0)
        self.messages: list[tuple[int, ToCollector]] = []
        self.on_send: Any = lambda node: None

    @property
    def nodes(self) -> list[int]:
        return list(self.epochs)

    def epoch(self, node: int) -> int | None:
        return self.epochs.get(node)

    def send(self, node: int, message: ToCollector) -> None:
        self.messages.append((node, message))
        self.on_send(node)

    def send_to_each(self, nodes: Iterable[int], message: ToCollector) -> None:
        for node in nodes:
            self.send(node, message)

    def states(self) -> dict[int, Serve]:
        """Return the last state of each node."""
        return {node: m for node, m in self.messages if isinstance(m, Serve)}


def connect(hub: Any, roster: EngineRoster, num_nodes: int) -> Collectors:
    """Return collectors of all nodes, which are connected and configured."""
    collectors = Collectors(hub, roster)
    collectors.configure(dict.fromkeys(range(num_nodes), configuration()))
    for node in range(num_nodes):
        collectors.welcome(node, 0)
    return collectors


def test_a_node_that_cannot_use_an_engine_gets_each_state_without_it() -> None:
    hub = Hub(3)
    roster = EngineRoster()
    collectors = connect(hub, roster, 3)
    roster.set_engines(ENGINES)
    roster.mark_unreachable(1, ENGINES[0])
    collectors.set_version(4)
    collectors.set_paused(True)
    states = hub.states()
    assert {node: (s.version, s.is_paused) for node, s in states.items()} == dict.fromkeys(
        range(3), (4, True)
    )
    assert [len(states[node].engines) for node in range(3)] == [2, 1, 2]


def test_a_collector_that_connects_during_a_broadcast_gets_its_configuration_first() -> None:
    """A message to a node that is gone lets the hub receive, and node 1 has a new collector."""
    hub = Hub(2)
    collectors = connect(hub, EngineRoster(), 2)
    hub.messages.clear()

    def replace(node: int) -> None:
        if node == 0:
            hub.epochs[1] = 1

    hub.on_send = replace
    collectors.set_version(2)
    assert [node for node, _ in hub.messages] == [0]
    collectors.welcome(1, 1)
    assert [type(m) for node, m in hub.messages if node == 1] == [Configure, Serve]
