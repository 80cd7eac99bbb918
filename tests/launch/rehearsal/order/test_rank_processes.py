"""The processes that rehearse ranks, with stand-ins that rehearse nothing."""

import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from launch.rehearsal.cuda_guard import RehearsalUnavailable
from launch.rehearsal.order.rehearsals import RankProcesses
from launch.rehearsal.order.scenario import Mail


class Stub:
    """A scenario in which every rank runs a function with its number and its mail."""

    def __init__(self, function: Callable[[int, Mail], None]) -> None:
        self.function = function
        self.processes: dict[int, ForkProcess] = {}
        self.max_running = 0

    def start(self, rank: int, mail: Mail, out: Path, log: Path) -> ForkProcess:
        def run() -> None:
            with log.open("w") as sys.stderr:
                self.function(rank, mail)
                out.write_text(str(rank))

        process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
        process.start()
        self.processes[rank] = process
        running = sum(other.exitcode is None for other in self.processes.values())
        self.max_running = max(self.max_running, running)
        return process


def processes_of(stub: Any, folder: Path, limit: int) -> RankProcesses:
    return RankProcesses(stub, folder, limit)


@pytest.mark.slow
def test_all_ranks_run_but_only_some_at_a_time(tmp_path: Path) -> None:
    stub = Stub(lambda rank, mail: time.sleep(0.02))
    processes_of(stub, tmp_path, 2).run(range(5))
    files = sorted(file.name for file in tmp_path.glob("*.trace"))
    assert files == [f"rank-{rank}.trace" for rank in range(5)]
    assert stub.max_running == 2


def test_rank_zero_alone_gets_the_mail(tmp_path: Path) -> None:
    def write_mail(rank: int, mail: Mail) -> None:
        (tmp_path / f"mail-{rank}").write_text(repr(dict(mail)))

    processes_of(Stub(write_mail), tmp_path, 1).run([0, 1], {"export": [b"weights"]})
    assert (tmp_path / "mail-0").read_text() == "{'export': [b'weights']}"
    assert (tmp_path / "mail-1").read_text() == "{}"


def test_a_rank_that_fails_is_named_and_ends_the_others(tmp_path: Path) -> None:
    def fail_on_three(rank: int, mail: Mail) -> None:
        if rank != 3:
            time.sleep(60)
        print("rank 3: a mask that depends on weights", file=sys.stderr)
        sys.exit(2)

    stub = Stub(fail_on_three)
    words = r"rank 3 cannot be rehearsed \(exit 2\): rank 3: a mask that depends on weights"
    with pytest.raises(RehearsalUnavailable, match=words):
        processes_of(stub, tmp_path, 2).run([5, 3])
    stub.processes[5].join(10)
    assert stub.processes[5].exitcode == -9
