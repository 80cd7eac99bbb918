"""Which ranks of this node live, as one of them sees it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.run.supervision.local_ranks import LocalRanks
from sglang_bridge.server import process_table
from sglang_bridge.server.process_table import lives
from tests.support.local_ranks import environment, ranks

LOOK = """
import os, sys
from megatron_rl.run.supervision.local_ranks import LocalRanks
siblings = LocalRanks.from_environment(os.environ)
for line in sys.stdin:
    print(siblings.dead_ranks(), siblings.is_lowest_living(), flush=True)
"""


def test_without_torchrun_there_are_none() -> None:
    alone = LocalRanks.from_environment({})
    assert (alone.rank, alone.dead_ranks(), alone.is_lowest_living(), alone.is_orphaned, alone.has_report()) == (
        0,
        [],
        True,
        False,
        False,
    )
    by_hand = LocalRanks.from_environment({"RANK": "3", "WORLD_SIZE": "4"})
    assert (by_hand.rank, by_hand.dead_ranks()) == (3, [])


def test_a_killed_rank_is_missed_before_and_after_torchrun_reaps_it(tmp_path: Path) -> None:
    with ranks(3, tmp_path) as jobs:
        siblings = LocalRanks(rank=0, local_rank=0, count=3, agent=os.getpid())
        assert siblings.living_ranks() == {0, 1, 2}
        jobs[1].send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, jobs[1].pid, os.WEXITED | os.WNOWAIT)  # a zombie by now
        assert siblings.living_ranks() == {0, 2}
        jobs[1].wait()
        assert siblings.living_ranks() == {0, 2}


def test_a_rank_that_was_started_a_moment_ago_is_not_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel shows the environment of a process that is forked once its program is loaded."""
    with ranks(3, tmp_path) as jobs:
        siblings = LocalRanks(rank=1, local_rank=1, count=3, agent=os.getpid())
        read, unread = process_table._environment, {jobs[0].pid: 3}

        def hidden_at_first(pid: int) -> bytes:
            unread[pid] = unread.get(pid, 0) - 1
            return b"" if unread[pid] >= 0 else read(pid)

        monkeypatch.setattr(process_table, "_environment", hidden_at_first)
        monkeypatch.setattr(
            LocalRanks, "is_orphaned", False
        )  # their agent is this process, not its parent
        assert siblings.dead_ranks() == []
        unread[jobs[0].pid] = 3
        assert not siblings.is_lowest_living()


def test_a_rank_that_is_killed_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalRanks, "is_orphaned", False)
    with ranks(2, tmp_path) as jobs:
        siblings = LocalRanks(rank=0, local_rank=0, count=2, agent=os.getpid())
        assert siblings.dead_ranks() == []
        jobs[1].kill()
        os.waitid(os.P_PID, jobs[1].pid, os.WEXITED | os.WNOWAIT)
        assert not process_table.starting(jobs[1].pid)
        assert siblings.dead_ranks() == [1]


def test_a_process_that_ends_is_not_one_that_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither has an environment, and one that frees a lot of memory takes seconds to end."""
    monkeypatch.setattr(process_table, "_environment", lambda pid: b"")
    assert process_table.starting(os.getpid())
    fields = process_table._fields(os.getpid())
    fields[6] = str(int(fields[6]) | 0x4)
    monkeypatch.setattr(process_table, "_fields", lambda pid: fields)
    assert not process_table.starting(os.getpid())


def test_the_lowest_living_rank_leads(tmp_path: Path) -> None:
    look = [sys.executable, "-c", LOOK]
    root = str(Path(__file__).resolve().parents[2])
    with ranks(1, tmp_path) as (first,):
        second = subprocess.Popen(
            look,
            env=os.environ | environment(1, 2, tmp_path) | {"PYTHONPATH": root},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert second.stdin is not None and second.stdout is not None
        said = []
        for _ in range(2):
            second.stdin.write("look\n")
            second.stdin.flush()
            said.append(second.stdout.readline().strip())
            first.kill()
            first.wait()
        second.stdin.close()
        assert second.wait(30) == 0
    assert said == ["[] False", "[0] True"]


def test_words_of_any_rank_of_the_node_are_heard(tmp_path: Path) -> None:
    siblings = LocalRanks.from_environment(environment(0, 2, tmp_path))
    environment(1, 2, tmp_path)
    assert not siblings.has_report()
    (tmp_path / "1" / "error.json").write_text("{}")
    assert siblings.has_report()


def test_a_rank_ends_when_its_torchrun_is_killed(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    rank = (
        f"import os, sys, time\nsys.path.insert(0, {str(root)!r})\n"
        "from megatron_rl.run.supervision.local_ranks import LocalRanks\nfrom megatron_rl.run.supervision.watchdog import end_with_torchrun\n"
        "end_with_torchrun(LocalRanks.from_environment(os.environ))\nprint('ready', flush=True)\ntime.sleep(60)\n"
    )
    launcher = (
        "import subprocess, sys\n"
        f"job = subprocess.Popen([sys.executable, '-c', {rank!r}], stdout=subprocess.PIPE, text=True)\n"
        "job.stdout.readline(); print(job.pid, flush=True); job.wait()\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", launcher],
        env=os.environ | environment(0, 1, tmp_path),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    assert lives(pid)
    job.kill()
    job.wait()
    deadline = time.monotonic() + 10
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(pid)
