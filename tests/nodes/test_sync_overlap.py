"""The next bucket is gathered while the last one travels over a slow link."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes import Node, Nodes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = 24
BUCKET_BYTES = 2**20
MEGABITS = 100.0
PYTHON = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "share",
    [
        pytest.param(0.5, marks=pytest.mark.nightly),
        0.9,
        pytest.param(1.5, marks=pytest.mark.nightly),
    ],
)
def test_a_sync_takes_as_long_as_the_slower_of_gathering_and_sending(
    tmp_path: Path, nodes: Nodes, share: float
) -> None:
    """share: how long gathering takes, of the time that sending takes."""
    sender, receiver = nodes
    sending = BUCKETS * BUCKET_BYTES * 8 / (MEGABITS * 1e6)
    gathering = share * sending
    with open_receiver(receiver, tmp_path / "port") as url:
        nodes.limit(receiver, MEGABITS)
        alone, both = seconds_of_syncs(sender, url, gathering)
    slower = max(alone, gathering)
    print(
        f"gathering {gathering:.2f} s, sending {alone:.2f} s ({sending:.2f} s at {MEGABITS:g} "
        f"Mbit/s), both {both:.2f} s: {both / slower:.3f} of the slower"
    )
    assert alone >= sending * 0.95, "the link is not slow"
    assert both <= 1.15 * slower


@contextlib.contextmanager
def open_receiver(node: Node, file: Path) -> Iterator[str]:
    """Start an engine on a node; yields its URL."""
    environment = PYTHON | {"WEIGHT_RECEIVER_HOST": node.address}
    command = (sys.executable, "-m", "tests.support.weight_receiver", str(file))
    process = node.start(*command, environment=environment, cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        yield f"http://{node.address}:{file.read_text()}"
    finally:
        process.kill()


def seconds_of_syncs(node: Node, url: str, gathering: float) -> tuple[float, float]:
    """Send from a node without gathering, and with so many seconds of it: the best of three."""
    paces = ("0", *[str(gathering / BUCKETS)] * 3)
    words = (url, str(BUCKETS), str(BUCKET_BYTES), *paces)
    program = [sys.executable, "-m", "tests.nodes.paced_sender", *words]
    variables = [f"{name}={value}" for name, value in PYTHON.items()]
    output = node.run("env", "-C", str(ROOT), *variables, *program, seconds=200)
    alone, *both = json.loads(output.strip().splitlines()[-1])
    return alone, min(both)
