"""Ranks of this node that were stopped are named, and killed once that is reported."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.run.supervision.frozen_ranks import FrozenRanks, RankFrozen
from megatron_rl.run.supervision.local_ranks import LocalRanks
from sglang_bridge.server.process_table import kill, process_tree
from tests.support.local_ranks import start_ranks


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def suspend(job: subprocess.Popen[str]) -> None:
    job.send_signal(signal.SIGSTOP)
    while psutil.Process(job.pid).status() != psutil.STATUS_STOPPED:
        pass


@pytest.mark.parametrize(("victim", "rank"), [(0, 1), (1, 0)])
def test_a_stopped_rank_is_named_with_its_process(victim: int, rank: int, tmp_path: Path) -> None:
    clock = Clock()
    with start_ranks(2, tmp_path) as jobs:
        frozen_ranks = FrozenRanks(
            LocalRanks(rank=rank, local_rank=rank, count=2, agent=os.getpid()), clock=clock
        )
        for clock.now in range(1, 20):
            frozen_ranks.check()
        suspend(jobs[victim])
        for clock.now in range(20, 27):
            frozen_ranks.check()
        clock.now = 27
        message = rf"rank {victim} of the training was stopped .* 7 s: process {jobs[victim].pid}"
        with pytest.raises(RankFrozen, match=message) as failure:
            frozen_ranks.check()
        assert failure.value.exit_code == ExitCode.PEER_FAILED
        failure.value.kill_processes()
        assert jobs[victim].wait(10) == -signal.SIGKILL
        assert jobs[rank].poll() is None
        clock.now = 28
        frozen_ranks.check()


@pytest.mark.slow
def test_a_stopped_engine_of_a_rank_is_not_a_stopped_rank(tmp_path: Path) -> None:
    """The rank that owns the engine watches it."""
    clock = Clock()
    code = (
        "import subprocess\n"
        "subprocess.run(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    )
    with start_ranks(2, tmp_path, code) as jobs:
        children: list[psutil.Process] = []
        while not children:
            children = psutil.Process(jobs[0].pid).children()
        children[0].suspend()
        frozen_ranks = FrozenRanks(
            LocalRanks(rank=1, local_rank=1, count=2, agent=os.getpid()), clock=clock
        )
        for clock.now in range(30):
            frozen_ranks.check()
        for job in jobs:
            kill(process_tree(job.pid))


def test_without_torchrun_no_rank_is_watched() -> None:
    FrozenRanks(LocalRanks()).check()
