"""A hub with one connected collector."""

from collections.abc import Iterator

import pytest

from megatron_rl.rollouts.queue.hub import CollectorHub
from tests.support.collectors import Peer


@pytest.fixture
def silence_seconds() -> float:
    """After which a collector is gone. A test gives another value as its parameter."""
    return 12.0


@pytest.fixture
def hub(silence_seconds: float) -> Iterator[CollectorHub]:
    hub = CollectorHub("127.0.0.1", silence_seconds=silence_seconds)
    yield hub
    hub.close()


@pytest.fixture
def peer(hub: CollectorHub) -> Iterator[Peer]:
    """The connected collector of node 0."""
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    yield peer
    peer.close()
