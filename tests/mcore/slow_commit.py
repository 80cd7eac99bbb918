"""Script for torchrun: rank 0 completes an export for longer than the limit of the ranks' groups.

Usage: slow_commit.py DIRECTORY
"""

import datetime
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_rl.mcore import compat

compat.install()

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megatron_rl.mcore.checkpoint import streaming
from megatron_rl.records.progress import print_line

LIMIT_SECONDS = 2


def commit_slowly(*_: Any, **__: Any) -> None:
    time.sleep(2 * LIMIT_SECONDS)


def main() -> None:
    # Imports may take one rank longer than the limit
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    dist.barrier()
    c10d._set_pg_timeout(datetime.timedelta(seconds=LIMIT_SECONDS), dist.group.WORLD)
    streaming.commit_checkpoint = commit_slowly
    directory = Path(sys.argv[1])
    weights: Any = SimpleNamespace(buckets=[])
    streaming.write_hf(weights, directory / "out", source=directory, dtype=torch.float32)
    print_line(f"RESULT rank {dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
