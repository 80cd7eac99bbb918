"""Detecting the living ranks of a node, and the death of a rank or of torchrun."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_rl.run.supervision.local_ranks import LocalRanks
from sglang_bridge.server import process_table
from sglang_bridge.server.process_table import is_alive
from tests.support.local_ranks import ROOT, start_ranks, torchrun_environment

# One line of output for each line of input
LOOK = """
import os, sys
from megatron_rl.run.supervision.local_ranks import LocalRanks
ranks = LocalRanks.from_environment(os.environ)
for line in sys.stdin:
    print(ranks.dead_ranks(), ranks.is_lowest_living(), flush=True)
"""
WAIT_FOR_TORCHRUN = f"""
import os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.watchdog import end_with_torchrun
end_with_torchrun(LocalRanks.from_environment(os.environ))
print("ready", flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import subprocess, sys
code = {WAIT_FOR_TORCHRUN!r}
job = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
job.stdout.readline()
print(job.pid, flush=True)
job.wait()
"""


def test_without_torchrun_there_are_no_other_ranks() -> None:
    ranks = LocalRanks.from_environment({})
    assert ranks.rank == 0
    assert ranks.dead_ranks() == []
    assert ranks.is_lowest_living()
    assert not ranks.is_orphaned
    assert not ranks.has_report()


def test_without_torchrun_the_rank_is_still_read() -> None:
    ranks = LocalRanks.from_environment({"RANK": "3", "WORLD_SIZE": "4"})
    assert ranks.rank == 3
    assert ranks.dead_ranks() == []


def test_a_killed_rank_is_dead_before_and_after_torchrun_reaps_it(tmp_path: Path) -> None:
    with start_ranks(3, tmp_path) as jobs:
        ranks = LocalRanks(rank=0, local_rank=0, count=3, agent=os.getpid())
        assert ranks.living_ranks() == {0, 1, 2}
        jobs[1].send_signal(signal.SIGKILL)
        # The process is a zombie after this
        os.waitid(os.P_PID, jobs[1].pid, os.WEXITED | os.WNOWAIT)
        assert ranks.living_ranks() == {0, 2}
        jobs[1].wait()
        assert ranks.living_ranks() == {0, 2}


def test_a_rank_that_is_being_started_is_not_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel shows the environment of a forked process once its program is loaded."""
    with start_ranks(3, tmp_path) as jobs:
        ranks = LocalRanks(rank=1, local_rank=1, count=3, agent=os.getpid())
        read_environment = psutil.Process.environ
        failures = {jobs[0].pid: 3}

        def fail_at_first(process: psutil.Process) -> dict[str, str]:
            failures[process.pid] = failures.get(process.pid, 0) - 1
            return {} if failures[process.pid] >= 0 else read_environment(process)

        monkeypatch.setattr(psutil.Process, "environ", fail_at_first)
        # The agent of these ranks is this process, not its parent
        monkeypatch.setattr(LocalRanks, "is_orphaned", False)
        assert ranks.dead_ranks() == []
        failures[jobs[0].pid] = 3
        assert not ranks.is_lowest_living()


def test_a_killed_rank_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalRanks, "is_orphaned", False)
    with start_ranks(2, tmp_path) as jobs:
        ranks = LocalRanks(rank=0, local_rank=0, count=2, agent=os.getpid())
        assert ranks.dead_ranks() == []
        jobs[1].kill()
        os.waitid(os.P_PID, jobs[1].pid, os.WEXITED | os.WNOWAIT)
        assert not process_table.is_starting(jobs[1].pid)
        assert ranks.dead_ranks() == [1]


def test_a_process_that_ends_is_not_one_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has an environment, and a process that frees much memory takes seconds to end."""
    monkeypatch.setattr(psutil.Process, "environ", lambda process: {})
    assert process_table.is_starting(os.getpid())
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not process_table.is_starting(process.pid)


def test_the_lowest_living_rank_changes_when_rank_0_dies(tmp_path: Path) -> None:
    with start_ranks(1, tmp_path) as (first,):
        second = subprocess.Popen(
            [sys.executable, "-c", LOOK],
            env=os.environ | torchrun_environment(1, 2, tmp_path) | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert second.stdin is not None
        assert second.stdout is not None
        lines = []
        for _ in range(2):
            second.stdin.write("look\n")
            second.stdin.flush()
            lines.append(second.stdout.readline().strip())
            first.kill()
            first.wait()
        second.stdin.close()
        assert second.wait(30) == 0
    assert lines == ["[] False", "[0] True"]


def test_the_report_of_any_rank_of_the_node_is_found(tmp_path: Path) -> None:
    ranks = LocalRanks.from_environment(torchrun_environment(0, 2, tmp_path))
    torchrun_environment(1, 2, tmp_path)
    assert not ranks.has_report()
    (tmp_path / "1" / "error.json").write_text("{}")
    assert ranks.has_report()


def test_a_rank_ends_when_its_torchrun_is_killed(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER],
        env=os.environ | torchrun_environment(0, 1, tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    assert is_alive(pid)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)
