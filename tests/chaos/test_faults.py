"""Faults in a run with two ranks: the reported cause, the exit codes, and the remains.

`python -m launch.studies.faults` prints the table of all faults.
"""

import json
import re
import signal
from pathlib import Path

import pytest

from launch.studies.faults.injection import MOST_SECONDS, by_name, suffer
from launch.testbed.jobs import family, start_job, survivors, wait_for_step
from megatron_rl.contracts.exit_codes import ExitCode

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.timeout(300),
]
FAULTS = ["SIGKILL rank 1", "SIGSTOP engine"]
# Torchrun's own report begins with one of these
_TORCHRUN_REPORT = re.compile(r"torch\.distributed\.elastic|torch/distributed/")


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_the_first_line_and_no_process_is_left(name: str, tmp_path: Path) -> None:
    fault = by_name(name)
    outcome = suffer(fault, tmp_path / "job")
    assert re.match(fault.says, outcome.first_line), outcome.errors
    assert outcome.code == fault.code, outcome.errors
    assert outcome.seconds <= MOST_SECONDS
    assert outcome.left == []
    assert outcome.shared_memory == []
    # A rank that was killed has no exit code of its own
    if outcome.root_cause is not None and outcome.root_cause >= 0:
        assert outcome.root_cause == fault.code
    rank_errors = _TORCHRUN_REPORT.split(outcome.errors, maxsplit=1)[0]
    assert "Traceback" not in rank_errors


def test_a_run_without_torchrun_ends_with_the_documented_code(tmp_path: Path) -> None:
    errors = tmp_path / "errors.txt"
    job = start_job(tmp_path, "train.total_steps=500", errors=errors)
    wait_for_step(tmp_path / "job", 1, job)
    processes = family(job)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == ExitCode.TERMINATED
    record = json.loads((tmp_path / "job/exit.json").read_text())
    assert record["code"] == ExitCode.TERMINATED
    assert errors.read_text().splitlines()[1] == "the run was stopped (SIGTERM)"
    assert survivors(processes, 5) == []
