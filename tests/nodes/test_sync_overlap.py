"""The next bucket is gathered while the last one travels over a slow link."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.support.nodes import Nodes

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = 24
BUCKET_BYTES = 2**20
MEGABITS = 100.0
PYTHON = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", [0.5, 0.9, 1.5])
def test_a_sync_takes_as_long_as_the_slower_of_gathering_and_sending(
    tmp_path: Path, nodes: Nodes, share: float
) -> None:
    """share: how long gathering takes, of the time that sending takes."""
    sender, receiver = nodes
    file = tmp_path / "port"
    command = (sys.executable, "-m", "tests.support.weight_receiver", str(file))
    environment = PYTHON | {"WEIGHT_RECEIVER_HOST": receiver.address}
    process = receiver.start(*command, environment=environment, cwd=ROOT)
    try:
        deadline = time.monotonic() + 60
        while not file.exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        nodes.limit(receiver, MEGABITS)
        sending = BUCKETS * BUCKET_BYTES * 8 / (MEGABITS * 1e6)
        gathering = share * sending
        url = f"http://{receiver.address}:{file.read_text()}"
        pace = str(gathering / BUCKETS)
        words = (url, str(BUCKETS), str(BUCKET_BYTES), "0", pace)
        program = [sys.executable, "-m", "tests.nodes.paced_sender", *words]
        variables = [f"{name}={value}" for name, value in PYTHON.items()]
        output = sender.run("env", "-C", str(ROOT), *variables, *program, seconds=200)
    finally:
        process.kill()
    alone, both = json.loads(output.strip().splitlines()[-1])
    slower = max(alone, gathering)
    print(
        f"gathering {gathering:.2f} s, sending {alone:.2f} s ({sending:.2f} s at {MEGABITS:g} "
        f"Mbit/s), both {both:.2f} s: {both / slower:.3f} of the slower"
    )
    assert alone >= sending * 0.95, "the link is not slow"
    assert both <= 1.15 * slower
