from collections.abc import Iterator

import pytest

from megatron_rl.rollouts.hub import Hub
from tests.support.collectors import Peer


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub("127.0.0.1")
    yield hub
    hub.close()


@pytest.fixture
def peer(hub: Hub) -> Iterator[Peer]:
    """The connected collector of node 0."""
    peer = Peer(hub, 0)
    hub.wait_for(1, 5)
    yield peer
    peer.hang_up()
