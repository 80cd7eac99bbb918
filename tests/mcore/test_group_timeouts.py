"""The time that a rank waits for the others, in every group of a job."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
JOB = """
from megatron_rl.mcore import compat
compat.install()
import torch
from torch.distributed import distributed_c10d
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.parallel import initialize, shutdown

initialize(ParallelSettings(timeout_s=7.5), seed=1)
groups = list(distributed_c10d._world.pg_map)
timeouts = {g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups}
print(len(groups), sorted(timeouts))
shutdown()
"""


def test_no_group_waits_longer_than_the_setting_says() -> None:
    """Megatron counts in minutes."""
    path = f"{ROOT}:{ROOT / 'kernels'}"
    result = subprocess.run(
        [sys.executable, "-c", JOB],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    count, timeouts = result.stdout.strip().splitlines()[-1].split(" ", 1)
    assert int(count) > 10
    assert ast.literal_eval(timeouts) == [7.5]
