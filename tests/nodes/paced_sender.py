"""Script: sends buckets whose tensors take a while to gather, and prints the seconds as JSON.

Usage: paced_sender.py URL BUCKETS BUCKET_BYTES SECONDS_PER_BUCKET...; one update for each pace.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence

import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.keys import create_keys
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.distributed import DistributedTransport
from tests.support.updaters import SoleUpdater


def stream(buckets: int, bucket_bytes: int, seconds: float) -> NamedTensors:
    """One tensor for each bucket, after the seconds that it takes to gather."""
    for index in range(buckets):
        time.sleep(seconds)
        yield f"w{index}", torch.full((bucket_bytes // 4,), float(index))


def main(url: str, buckets: int, bucket_bytes: int, paces: Sequence[float]) -> None:
    """Time each pace, after an update that opens the lane."""
    transport = DistributedTransport(backend="gloo", timeout_seconds=60)
    updater = SoleUpdater(transport, bucket_bytes=bucket_bytes)
    admins = [AdminClient(Engine(url=url), create_keys())]
    updater.push(stream(1, 4, 0.0), 0, admins)
    walls = []
    for version, seconds in enumerate(paces, start=1):
        start = time.perf_counter()
        updater.push(stream(buckets, bucket_bytes, seconds), version, admins)
        walls.append(time.perf_counter() - start)
    print(json.dumps(walls))
    updater.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), [float(pace) for pace in sys.argv[4:]])
