"""A hub with one connected collector."""

from collections.abc import Iterator

import pytest

from megatron_rl.rollouts.queue.hub import CollectorHub
from tests.support.collectors import Peer


@pytest.fixture
def hub() -> Iterator[CollectorHub]:
    hub = CollectorHub("127.0.0.1")
    yield hub
    hub.close()


@pytest.fixture
def peer(hub: CollectorHub) -> Iterator[Peer]:
    """The connected collector of node 0."""
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    yield peer
    peer.close()
