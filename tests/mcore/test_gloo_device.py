"""All groups of a rank share one gloo device.

Each device has a thread that wakes up a hundred times a second, even without work.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
TWO_RANKS = """
import os
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.job import join, leave
from sglang_bridge.server.ports import choose_port

# After the imports, which take seconds: a process with lazy connections, and one without
is_lazy = int(os.fork() == 0)
if is_lazy:
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
else:
    assert os.wait()[1] == 0
first = choose_port("127.0.0.1")
second = choose_port("127.0.0.1", first + 1)
os.environ["RANK"] = str(int(os.fork() == 0))
for port in (first, second):  # the store of the previous round may still answer
    os.environ["MASTER_PORT"] = str(port)
    rank = join(ParallelSettings(timeout_s=10)).rank
    groups = [dist.new_group() for _ in range(8)]
    for group in groups:
        dist.all_reduce(total := torch.ones(3), group=group)
        assert total.tolist() == [2, 2, 2] and dist.get_backend(group) == "gloo"
        distributed_c10d._set_pg_timeout(timedelta(seconds=9), group)
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=9)
    if rank == 0:
        threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
        print("lazy" if is_lazy else "eager", threads.count("gloo_tcp_loop"), flush=True)
    leave()
if rank == 0:
    assert os.wait()[1] == 0
os._exit(0)
"""


@pytest.mark.slow
def test_groups_share_one_polling_thread_unless_connections_are_lazy() -> None:
    """With TORCH_GLOO_LAZY_INIT a second group on a device never connects.

    torch can still change the timeouts of each group.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TORCH_", "GLOO_"))
    }
    environment |= {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        "PYTHONPATH": f"{TESTS.parent}:{TESTS.parent / 'kernels'}",
        "CUDA_VISIBLE_DEVICES": "",
    }
    result = subprocess.run(
        [sys.executable, "-c", TWO_RANKS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["lazy 10", "lazy 10", "eager 1", "eager 1"]
