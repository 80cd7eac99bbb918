"""Real runs after faults: those that end a run, and those that a run outlives.

The tables of all faults: python -m tests.lab.faults.
"""

import json
import re
import signal
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from tests.lab.faults.injection import MAX_SECONDS, inject
from tests.lab.faults.recovery import MAX_SECONDS as MAX_RECOVERY_SECONDS
from tests.lab.faults.recovery import Laboratory, Session
from tests.lab.faults.recovery_table import SESSIONS
from tests.lab.faults.servers import ServerPark
from tests.lab.faults.table import fault_named
from tests.support.exactness import EXACT
from tests.support.jobs import process_tree, start_job, survivors, wait_for_step

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.chaos,
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.timeout(900),
]
FAULTS = [
    "SIGKILL rank 1",
    "SIGSTOP rank 0",
    "SIGSTOP rank 1",
]


@pytest.fixture(scope="module")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    directory = tmp_path_factory.mktemp("faults")
    park = ServerPark(directory / "servers")
    yield Laboratory(directory, park)
    park.close()


@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
)
@pytest.mark.parametrize("session", SESSIONS, ids=attrgetter("name"))
def test_nothing_is_lost_or_trained_twice(session: Session, laboratory: Laboratory) -> None:
    outcome = laboratory.run(session)
    assert (outcome.num_lost, outcome.evidence.num_doubled) == (0, 0), outcome.output
    assert outcome.has_same_weights, outcome.output
    assert [row for row in outcome.rows if row.net_seconds > MAX_RECOVERY_SECONDS] == []


@pytest.mark.parametrize("name", FAULTS)
def test_the_cause_is_the_first_line_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    fault = fault_named(name)
    outcome = inject(fault, tmp_path / "job")
    assert re.match(fault.first_line, outcome.first_line), outcome.errors
    assert outcome.code == fault.code, outcome.errors
    assert outcome.seconds <= MAX_SECONDS
    assert (outcome.survivors, outcome.shared_memory) == ([], [])
    # A rank that was killed has a negative code instead of the code of the run.
    if outcome.root_cause is not None and outcome.root_cause >= 0:
        assert outcome.root_cause == fault.code
    assert "Traceback" not in lines_of_ranks(outcome.errors)


def lines_of_ranks(errors: str) -> str:
    """Standard error until torchrun prints a traceback of its own."""
    return re.split(r"torch\.distributed\.elastic|torch/distributed/", errors)[0]


def test_plain_python_ends_with_the_documented_code(tmp_path: Path) -> None:
    job = start_job(tmp_path, "train.total_steps=500", errors=tmp_path / "errors.txt")
    wait_for_step(tmp_path / "job", 1, job)
    processes = process_tree(job)
    job.send_signal(signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == ExitCode.TERMINATED
    assert json.loads((tmp_path / "job/exit.json").read_text())["code"] == ExitCode.TERMINATED
    assert "SIGTERM" in (tmp_path / "errors.txt").read_text().split("\n")[1]
    assert survivors(processes, 20) == []
