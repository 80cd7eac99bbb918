"""The record of a run's starts, and of how each of them ended."""

import os
from pathlib import Path

import pytest

from megatron_rl.records.exit_record import write_exit_record
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.starts import (
    End,
    Start,
    launch_of,
    new_start,
    read_starts,
    with_last_end,
    write_starts,
)


def write_steps(directory: Path, steps: int) -> None:
    with MetricsLog(RunDirectory(directory)) as metrics:
        for step in range(steps + 1):
            metrics.write(step, {"train/loss": 1.0})


def test_starts_are_read_as_they_were_written(tmp_path: Path) -> None:
    starts = (Start(5.0, 1, "a", "host", End(3, None, "killed")), Start(9.0, 3, "b"))
    write_starts(tmp_path, starts)
    assert read_starts(tmp_path) == starts


@pytest.mark.parametrize("content", [b"nonsense\n", b'{"time":1'])
def test_a_damaged_record_counts_as_empty(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "starts.jsonl").write_bytes(content)
    assert read_starts(tmp_path) == ()


def test_a_run_of_an_earlier_version_has_had_one_start(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == ()
    (tmp_path / "versions.json").touch()
    os.utime(tmp_path / "versions.json", (100, 100))
    assert read_starts(tmp_path) == (Start(100.0, 1),)


def test_a_start_ends_with_the_code_and_the_step_it_was_in(tmp_path: Path) -> None:
    write_steps(tmp_path, 4)
    write_exit_record(tmp_path, 7, "rank 1 ended")
    starts = with_last_end((Start(1.0, 1), Start(2.0, 3)), tmp_path)
    assert [start.end for start in starts] == [None, End(5, 7, "rank 1 ended")]
    assert with_last_end(starts, tmp_path) == starts


def test_a_start_without_a_record_was_killed_in_its_first_step(tmp_path: Path) -> None:
    (start,) = with_last_end((Start(1.0, 3),), tmp_path)
    assert start.end == End(3, None, "all its processes were killed")
    assert with_last_end((), tmp_path) == ()


def environment(**changes: str) -> dict[str, str]:
    return {"TORCHELASTIC_RUN_ID": "7", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"} | changes


def test_restarts_of_one_torchrun_have_one_identity_on_every_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 may be on another node after a restart."""
    before = launch_of(environment(TORCHELASTIC_RESTART_COUNT="0"))
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert launch_of(environment(TORCHELASTIC_RESTART_COUNT="1")) == before
    assert launch_of(environment(SLURM_RESTART_COUNT="1")) != before


def test_two_torchruns_with_the_same_name_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    single_node = environment(WORLD_SIZE="2")
    before = launch_of(single_node)
    assert launch_of(single_node) == before
    monkeypatch.setattr("os.getppid", os.getpid)  # another launcher
    assert launch_of(single_node) != before


def test_this_start_began_with_this_process() -> None:
    start = new_start(4, {})
    assert start.first_step == 4 and start.end is None
    assert 0 <= Path("/proc/self").stat().st_mtime - start.time < 24 * 3600
