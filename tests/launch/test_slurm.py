"""Command line of the Slurm script, with the commands of Slurm replaced by scripts."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch/slurm/train_rl.sbatch"
TORCHRUN = "/opt/venv/bin/torchrun"


SRUN = 'printf "%s\\n" "$@"'


def start(
    directory: Path, *overrides: str, srun: str = SRUN, **environment: str
) -> subprocess.CompletedProcess[str]:
    for name, body in (("scontrol", 'echo node-7; echo node-8; echo "$@" >&2'), ("srun", srun)):
        command = directory / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    path = f"{directory}:{os.environ['PATH']}"
    command_line = ["bash", str(SCRIPT), *overrides]
    return subprocess.run(
        command_line, env={"PATH": path, **environment}, capture_output=True, text=True, check=False
    )


def submit(
    directory: Path, *overrides: str, srun: str = SRUN, **environment: str
) -> subprocess.CompletedProcess[str]:
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
        "TORCHRUN": TORCHRUN,
    }
    return start(directory, *overrides, srun=srun, **(slurm | environment))


def words_of(directory: Path, *overrides: str, **environment: str) -> list[str]:
    result = submit(directory, *overrides, **environment)
    assert result.returncode == 0 and "show hostnames node-[7-8]" in result.stderr
    return result.stdout.splitlines()


def test_all_nodes_rendezvous_at_the_first_one(tmp_path: Path) -> None:
    words = words_of(tmp_path, "parallel=ep8", "run.name=a b")
    assert words[:2] == ["--kill-on-bad-exit=1", TORCHRUN]
    assert {
        "--nnodes=2",
        "--nproc-per-node=4",
        "--rdzv-endpoint=node-7:23456",
        "--rdzv-id=123456",
    } < set(words)
    assert words[-3:] == ["launch/train_rl.py", "parallel=ep8", "run.name=a b"]


def test_ranks_and_environment_can_be_chosen(tmp_path: Path) -> None:
    words = words_of(tmp_path, NPROC="6", TORCHRUN="/only/in/the/container")
    assert words[1] == "/only/in/the/container" and "--nproc-per-node=6" in words


@pytest.mark.parametrize(("code", "requeues"), [(75, True), (0, False), (143, False)])
def test_a_job_that_saved_before_its_limit_is_requeued(
    tmp_path: Path, code: int, requeues: bool
) -> None:
    """The signal arrives during the run, and the run ends while the request is written."""
    run = tmp_path / "runs/long"
    run.mkdir(parents=True)
    slow = tmp_path / "touch"
    slow.write_text('#!/bin/sh\n: > "$1"\nsleep 0.3\n')
    slow.chmod(0o755)
    srun = f"""kill -USR1 $PPID
        for _ in $(seq 200); do [ -e {run}/stop ] && break; sleep 0.05; done
        echo '{{"code":{code},"reason":"r"}}' > {run}/exit.json; exit {int(code != 0)}"""
    overrides = ("run.root=~/runs", "run.name=long", "run.resume=auto", "run.checkpoint_every=5")
    result = submit(tmp_path, *overrides, srun=srun, HOME=str(tmp_path))
    assert (run / "stop").exists() and ("requeue 123456" in result.stderr) == requeues
    assert result.returncode == (0 if requeues else int(code != 0))


def test_a_run_without_resume_gets_no_stop_request(tmp_path: Path) -> None:
    (tmp_path / "runs/short").mkdir(parents=True)
    result = submit(
        tmp_path,
        f"run.root={tmp_path}/runs",
        "run.name=short",
        srun="kill -USR1 $PPID; sleep 0.3; exit 3",
    )
    assert result.returncode == 3 and list((tmp_path / "runs/short").iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"SLURM_SUBMIT_DIR": "/"}, "/ holds no launch/train_rl.py"),
        ({"NPROC": "all"}, "NPROC=all is not a number of ranks"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_any_node_starts(
    tmp_path: Path, environment: dict[str, str], reason: str
) -> None:
    result = submit(tmp_path, **environment)
    assert (result.returncode, result.stdout) == (2, "")
    assert reason in result.stderr


def test_a_checkout_without_an_environment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train_rl.py").touch()
    result = submit(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), TORCHRUN="")
    assert (
        result.returncode == 2
        and "There is no .venv/bin/torchrun. Run make install" in result.stderr
    )


def test_outside_of_slurm_it_prints_how_to_submit_it(tmp_path: Path) -> None:
    usage = start(tmp_path, "--help")
    assert usage.returncode == 0
    assert "sbatch --nodes=2 launch/slurm/train_rl.sbatch experiment=quickstart" in usage.stdout
    result = start(tmp_path, "experiment=quickstart")
    assert (
        result.returncode == 2
        and "not a Slurm job" in result.stderr
        and "unbound" not in result.stderr
    )


RESUMED = ("run.name=long", "run.resume=auto", "run.checkpoint_every=5")


def submit_job_that_ends(
    directory: Path, *, exit_json: str, saves: bool
) -> subprocess.CompletedProcess[str]:
    """Submit a job whose run has a checkpoint of step 5, may save another one, and fails.

    exit_json: shell commands that write exit.json, or leave it.
    """
    run = directory / "runs/long"
    (run / "checkpoints/iter_0000005").mkdir(parents=True)
    os.utime(run / "checkpoints/iter_0000005", (1, 1))
    (run / "exit.json").write_text('{"code":75,"reason":"an earlier start"}')
    os.utime(run / "exit.json", (1, 1))
    save = f"mkdir {run}/checkpoints/iter_0000010" if saves else ""
    srun = f"cd {run}; sleep 0.05; {save or ':'}; {exit_json}; exit 1"
    result = submit(directory, f"run.root={directory}/runs", *RESUMED, srun=srun)
    assert [path.name for path in run.parent.iterdir()] == ["long"], "the marker is removed"
    return result


def record_of(code: int) -> str:
    return f"""echo '{{"code":{code},"reason":"r"}}' > exit.json"""


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize(
    "exit_json",
    [*(pytest.param(record_of(code), id=f"{code}") for code in (1, 4, 5, 7, 143)), "rm exit.json"],
)
def test_a_job_that_failed_or_was_killed_is_requeued_after_a_checkpoint(
    tmp_path: Path, exit_json: str, saves: bool
) -> None:
    """Without a checkpoint since its start, the run would fail at the same step for ever."""
    result = submit_job_that_ends(tmp_path, exit_json=exit_json, saves=saves)
    assert ("requeue 123456" in result.stderr) == saves
    assert ("Not requeued: the run failed" in result.stderr) == (not saves)
    assert result.returncode == (0 if saves else 1)


@pytest.mark.parametrize("code", [0, 2, 3, 6, 8, 129, 130])
def test_a_job_that_is_refused_complete_or_interrupted_is_not_requeued(
    tmp_path: Path, code: int
) -> None:
    result = submit_job_that_ends(tmp_path, exit_json=record_of(code), saves=True)
    assert "requeue 123456" not in result.stderr and result.returncode == 1


def test_the_exit_record_of_an_earlier_start_requeues_nothing(tmp_path: Path) -> None:
    """A start that is refused leaves that record, for example of a request to stop."""
    result = submit_job_that_ends(tmp_path, exit_json=":", saves=False)
    assert "requeue 123456" not in result.stderr and result.returncode == 1


def test_a_new_run_that_was_killed_before_its_directory_is_not_requeued(tmp_path: Path) -> None:
    result = submit(tmp_path, f"run.root={tmp_path}/new", *RESUMED, srun="exit 137")
    assert result.returncode == 137 and "requeue 123456" not in result.stderr
