"""Under the real torchrun, a failed run ends with its own report and one line."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_rl.run.supervision.torchrun_end import describe_failure
from tests.support.scripts import LAUNCH

TRACE = "Traceback (most recent call last)"


def start(script: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*torchrun, "--nproc-per-node=2", str(script), *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    "script", ["train_rl.py", pytest.param("preflight.py", marks=pytest.mark.nightly)]
)
def test_a_refusal_is_followed_by_one_line(script: str) -> None:
    end = start(LAUNCH / script, "optimizer.lr=fast")
    lines = end.stderr.splitlines()
    assert lines[0].startswith("optimizer.lr=fast: Must be a number")
    assert lines[-2:] == [
        "1 setting is refused; nothing was started.",
        "torchrun: rank 0 ended first, with exit code 2",
    ]
    assert len(lines) == 3 and not end.stdout
    assert end.returncode == 1


@pytest.mark.distributed
def test_a_rank_that_is_killed_is_named_with_the_signal(tmp_path: Path) -> None:
    """Also if it could report nothing."""
    script = tmp_path / "train_rl.py"
    script.write_text("import os\nif os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n")
    end = start(script)
    assert end.stderr.splitlines() == ["torchrun: rank 1 ended first, with signal SIGKILL"]
    assert end.returncode == 1


@pytest.mark.nightly
@pytest.mark.distributed
def test_the_traceback_stays_on_request_and_for_other_programs(tmp_path: Path) -> None:
    assert TRACE in start(LAUNCH / "train_rl.py", "lr=1", LOGLEVEL="INFO").stderr
    script = tmp_path / "other.py"
    script.write_text("raise SystemExit(3)\n")
    assert TRACE in start(script).stderr


@pytest.mark.parametrize(
    ("code", "end"), [(75, "exit code 75"), (-9, "signal SIGKILL"), (-15, "signal SIGTERM")]
)
def test_the_rank_that_ended_first_is_named(code: int, end: str) -> None:
    error = SimpleNamespace(get_first_failure=lambda: (3, SimpleNamespace(exitcode=code)))
    assert describe_failure(error) == f"torchrun: rank 3 ended first, with {end}"
