"""What a run with two ranks says and leaves when something happens to it.

The whole table: launch/studies/faults/__main__.py.
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


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_the_first_line_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    fault = by_name(name)
    outcome = suffer(fault, tmp_path / "job")
    assert re.match(fault.says, outcome.first_line), outcome.errors
    assert outcome.code == fault.code, outcome.errors
    assert outcome.seconds <= MOST_SECONDS
    assert (outcome.left, outcome.shared_memory) == ([], [])
    if (
        outcome.root_cause is not None and outcome.root_cause >= 0
    ):  # a rank that was killed has no code of ours
        assert outcome.root_cause == fault.code
    of_ranks = outcome.errors.partition("torch.distributed.elastic")[0].partition(
        "torch/distributed/"
    )[0]
    assert "Traceback" not in of_ranks


def test_plain_python_ends_with_the_documented_code(tmp_path: Path) -> None:
    job = start_job(tmp_path, "train.total_steps=500", errors=tmp_path / "errors.txt")
    wait_for_step(tmp_path / "job", 1, job)
    processes = family(job)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == ExitCode.TERMINATED
    assert json.loads((tmp_path / "job/exit.json").read_text())["code"] == ExitCode.TERMINATED
    assert (tmp_path / "errors.txt").read_text().split("\n")[
        1
    ] == "the run was stopped (SIGTERM)"
    assert survivors(processes, 5) == []
