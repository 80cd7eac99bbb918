"""Errors of a full, exhausted or read-only disk become one sentence."""

import errno
import json
import resource
from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.records.metrics_log import MetricsLog
from megatron_rl.records.run_directory import RunDirectory
from megatron_rl.records.write_errors import write_problem

FULL = Path("/dev/full")


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "read-only"),
        (errno.EFBIG, "ulimit -f"),
    ],
)
def test_the_cause_is_named(number: int, cause: str) -> None:
    problem = write_problem(OSError(number, "system message", "/runs/a/metrics.jsonl"))
    assert problem is not None
    assert problem.startswith("/runs/a/metrics.jsonl cannot be written: ")
    assert cause in problem


def test_libraries_in_rust_name_the_error_in_their_text() -> None:
    inner = RuntimeError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )
    outer = ValueError("saving failed")
    outer.__cause__ = inner
    assert "the disk is full" in str(write_problem(outer))


def test_other_errors_have_no_write_problem() -> None:
    assert write_problem(FileNotFoundError(errno.ENOENT, "No such file", "x")) is None
    assert write_problem(ValueError("28")) is None


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_the_error_names_the_metrics_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to(FULL)
    log = MetricsLog(RunDirectory(tmp_path))
    with pytest.raises(
        Failure, match=r"metrics\.jsonl cannot be written: the disk is full.*run\.root"
    ):
        log.write(1, {"a": 1.0})
    log.close()


def test_a_partial_line_is_removed(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    log = MetricsLog(RunDirectory(tmp_path))
    log.write(1, {"a": 1.0})
    resource.setrlimit(resource.RLIMIT_FSIZE, (40, hard))
    try:
        with pytest.raises(Failure, match="ulimit"):
            log.write(2, {"a": 1.0, "b" * 60: 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    log.write(3, {"a": 1.0})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(text)["step"] for text in lines] == [1, 3]
