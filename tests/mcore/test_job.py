"""Joining the ranks again after torchrun has started them again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config.schema import ParallelSettings
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.mcore.job import join

TESTS = Path(__file__).resolve().parents[1]
# Each rank leaves a key, and prints whether it sees keys of the earlier start
RANK = """
import os
import torch, torch.distributed as dist
from megatron_rl.config.schema import ParallelSettings
from megatron_rl.mcore.job import join
job = join(ParallelSettings(timeout_s=10))
dist.all_reduce(total := torch.ones(2))
store = job.store()
print(total.tolist(), store.check(["members/reports/0"]), flush=True)
dist.barrier()
store.set("members/reports/0", "old")
os._exit(1)
"""


def rank_environment(rank: int, *, restart: int, port: int, **changes: str) -> dict[str, str]:
    """The variables that torchrun sets for one of two ranks of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restart),
        "TORCHELASTIC_MAX_RESTARTS": "3",
        **changes,
    }


def start_ranks(restart: int, port: int) -> list[str]:
    """Start both ranks, and return the output of each."""
    common = os.environ | {"PYTHONPATH": f"{TESTS.parent}:{TESTS.parent / 'kernels'}"}
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", RANK],
            env=common | rank_environment(rank, restart=restart, port=port),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [job.communicate(timeout=120)[0].strip() for job in jobs]


@pytest.mark.distributed
@pytest.mark.timeout(200)
def test_ranks_that_start_again_see_nothing_of_the_earlier_ones_in_the_store() -> None:
    """torchrun keeps its store, and with it the addresses and reports of the earlier ranks."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for restart in (0, 1):
        assert start_ranks(restart, store.port) == ["[2.0, 2.0] False"] * 2


def test_restarts_on_several_nodes_need_a_new_store_for_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nodes count their restarts apart, so that no count names the common part of the store."""
    for name, text in rank_environment(0, restart=0, port=1, WORLD_SIZE="4").items():
        monkeypatch.setenv(name, text)
    # Another test may have left a process group in this process
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    with pytest.raises(Failure, match="export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        join(ParallelSettings())
