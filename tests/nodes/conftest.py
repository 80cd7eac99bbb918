"""Nodes of a cluster on this machine."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.nodes import Nodes, open_nodes, reason_without_nodes

OpenNodes = Callable[..., Nodes]


@pytest.fixture(scope="session")
def can_have_nodes() -> None:
    """Skip tests on machines without namespaces."""
    reason = reason_without_nodes()
    if reason:
        pytest.skip(reason)


@pytest.fixture
def nodes(tmp_path: Path, can_have_nodes: None) -> Iterator[Nodes]:
    """Give two nodes."""
    with open_nodes(tmp_path, "node-1", "node-2") as two_nodes:
        yield two_nodes
