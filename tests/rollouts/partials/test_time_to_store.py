"""The time that a checkpoint may take to store open responses, with a collector that hangs."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.engines.connections import EngineConnections
from megatron_rl.rollouts.hub import CollectorHub
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.steps.on_update import OnUpdate, StoredPartials, open_steps_ahead
from tests.support.collectors import Peer, request


def idle() -> None:
    pass


def test_a_collector_that_hangs_takes_no_more_time_than_there_is(
    hub: CollectorHub, peer: Peer
) -> None:
    lines: list[str] = []
    queue = RolloutQueue(hub, RolloutSettings(max_new_tokens=4), log=lines.append)
    queue.submit([request("a")])
    fleet: Any = SimpleNamespace(members=SimpleNamespace(serving=[]))
    unused: Any = None
    connections = EngineConnections(queue, weights=unused, fleet=fleet, open_admin=unused)
    start = time.monotonic()
    assert connections.store_partials(idle, max_seconds=1.5) == StoredPartials((), 0)
    assert 1.4 < time.monotonic() - start < 9  # of the 70 s of another checkpoint
    assert "did not store their open rollouts within 1 s" in lines[-1]


class Control:
    """Notes the time in which open responses are to be stored."""

    def __init__(self) -> None:
        self.max_seconds: list[float | None] = []

    def can_sample(self) -> bool:
        return True

    def store_partials(self, idle: Any, *, max_seconds: float | None) -> StoredPartials:
        self.max_seconds.append(max_seconds)
        return StoredPartials((), 3)


@pytest.mark.parametrize("on_update", ["budget", "resume"])
def test_half_of_the_time_to_stop_belongs_to_the_checkpoint_itself(on_update: str) -> None:
    settings = RolloutSettings(
        max_new_tokens=4, max_staleness=1, on_update=on_update, tokens_per_version=2
    )
    control: Any = Control()
    source: Any = SimpleNamespace(open_steps=(7,), open_groups=lambda groups: {7: groups})
    parts: OnUpdate
    _, parts = open_steps_ahead(settings, control, idle)
    for seconds_to_stop in (None, 20.0):
        groups = parts.before_save(source, is_stopping=True, seconds_to_stop=seconds_to_stop)
        assert groups == {7: ()}
    assert control.max_seconds == [None, 10.0]
    assert parts.num_uncounted == 6
