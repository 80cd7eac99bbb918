"""A start reads how the earlier starts of its run ended, and adds itself to them."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_rl.config.schema import Configuration
from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.records.exit_record import read_exit_record, write_exit_record
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.starts import Start, read_starts, write_starts
from megatron_rl.run.checkpoints.resume import ResumePoint, open_run_directory
from megatron_rl.run.checkpoints.resumed_directory import claim_directory
from megatron_rl.run.open_run import starts_with_this_one
from tests.support.checkpoints import make_state
from tests.support.configurations import configuration_of
from tests.support.past_runs import make_run_directory


def make_configuration(root: Path) -> Configuration:
    return configuration_of(
        ["experiment=smoke", f"run.root={root}", "run.name=job", "run.resume=auto"]
    )


class Run:
    """A run without engines and ranks: only its directory."""

    def __init__(self, root: Path) -> None:
        self.configuration = make_configuration(root)
        self.path = make_run_directory(self.configuration).path
        self.supervision: Any = SimpleNamespace(reporter=SimpleNamespace(directory=None))
        write_starts(self.path, [Start(1000.0, 1, host="node-1")])

    def start(self, *, after_step: int = 0) -> None:
        """Open the directory again as rank 0 does."""
        with claim_directory(self.path) or open("/dev/null"):
            state = make_state(after_step) if after_step else None
            point = ResumePoint(None, state)
            run = self.configuration.run
            starts = starts_with_this_one(run, point, self.path, self.supervision)
            open_run_directory(RunDirectory(self.path), self.configuration, point)
            write_starts(self.path, starts)

    def fail(self, code: int = 7) -> None:
        write_exit_record(self.path, code, "rank 1 ended")

    def ends(self) -> list[int | None]:
        ends = [start.end for start in read_starts(self.path)]
        return [None if end is None else end.code for end in ends]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_each_start_records_how_the_one_before_it_ended(run: Run) -> None:
    run.fail()
    run.start()
    run.fail(4)
    run.start(after_step=3)
    assert run.ends() == [7, 4, None]
    assert [start.first_step for start in read_starts(run.path)] == [1, 1, 4]


def test_a_failure_that_repeats_is_refused_once_and_recorded_as_the_end(run: Run) -> None:
    run.fail()
    run.start()
    run.fail()
    with pytest.raises(Failure):
        run.start()
    assert run.ends() == [7, 7, 2]
    assert run.supervision.reporter.directory == run.path
    assert read_exit_record(run.path) is None, "the reporter writes the refusal"
    assert (run.path / ".exit-reserve").stat().st_size > 0
    assert (run.path / "resumed/002/exit.json").exists(), "the failure itself is kept"
    run.fail(2)
    run.start()
    assert run.ends() == [7, 7, 2, None]


def test_a_run_starts_again_on_another_node(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dead node has left its lock file and no end, and its name only for people."""
    (run.path / ".alive").touch()
    monkeypatch.setattr(socket, "gethostname", lambda: "node-2")
    run.start(after_step=2)
    first, second = read_starts(run.path)
    assert (first.host, second.host) == ("node-1", "node-2")
    assert first.end is not None and first.end.code is None
    files = (path for path in run.path.rglob("*") if path.is_file())
    assert [path.name for path in files if b"node-1" in path.read_bytes()] == ["starts.jsonl"]


def test_a_new_run_has_no_earlier_starts(tmp_path: Path) -> None:
    c = make_configuration(tmp_path)
    supervision: Any = SimpleNamespace()
    (start,) = starts_with_this_one(c.run, ResumePoint(), tmp_path / "job", supervision)
    assert start.first_step == 1 and start.end is None
