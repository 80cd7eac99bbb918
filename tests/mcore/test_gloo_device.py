"""Groups of a rank share one gloo device, whose thread wakes up a hundred times a second whether or not it has work."""

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ONE_RANK = """
from pathlib import Path
import torch, torch.distributed as dist
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.job import join, leave

for _ in range(2):
    join(ParallelSettings())
    groups = [dist.new_group() for _ in range(8)]
    for group in groups:
        dist.all_reduce(total := torch.ones(3), group=group)
        assert total.tolist() == [1, 1, 1] and dist.get_backend(group) == "gloo"
    print([file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")].count("gloo_tcp_loop"))
    leave()
"""


def test_all_groups_of_a_rank_have_one_thread_that_polls() -> None:
    environment = {"PYTHONPATH": f"{TESTS.parent}:{TESTS.parent / 'kernels'}", "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(
        [sys.executable, "-c", ONE_RANK], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["1", "1"]
