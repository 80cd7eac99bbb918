"""The Slurm script's command line, with Slurm's own commands replaced by ones that show what they
were given.
"""

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
    done = submit(directory, *overrides, **environment)
    assert done.returncode == 0 and "show hostnames node-[7-8]" in done.stderr
    return done.stdout.splitlines()


def test_every_node_meets_at_the_first_one(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("code", "requeued"), [(75, True), (0, False), (143, False)])
def test_a_job_that_saved_before_its_limit_is_queued_again(
    tmp_path: Path, code: int, requeued: bool
) -> None:
    """The warning comes while the run goes on, and the run ends while it is passed on; what the run
    leaves decides.
    """
    run = tmp_path / "runs/long"
    run.mkdir(parents=True)
    slow = tmp_path / "touch"
    slow.write_text('#!/bin/sh\n: > "$1"\nsleep 0.3\n')
    slow.chmod(0o755)
    srun = f"""kill -USR1 $PPID
        for _ in $(seq 200); do [ -e {run}/stop ] && break; sleep 0.05; done
        echo '{{"code":{code},"reason":"r"}}' > {run}/exit.json; exit {int(code != 0)}"""
    overrides = ("run.root=~/runs", "run.name=long", "run.resume=auto", "run.checkpoint_every=5")
    done = submit(tmp_path, *overrides, srun=srun, HOME=str(tmp_path))
    assert (run / "stop").exists() and ("requeue 123456" in done.stderr) == requeued
    assert done.returncode == (0 if requeued else int(code != 0))


def test_a_run_that_cannot_go_on_is_not_asked_to_stop(tmp_path: Path) -> None:
    (tmp_path / "runs/short").mkdir(parents=True)
    done = submit(
        tmp_path,
        f"run.root={tmp_path}/runs",
        "run.name=short",
        srun="kill -USR1 $PPID; sleep 0.3; exit 3",
    )
    assert done.returncode == 3 and list((tmp_path / "runs/short").iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        (
            {"SLURM_SUBMIT_DIR": "/"},
            "/ holds no launch/train_rl.py. Submit the job from the repository's root",
        ),
        ({"NPROC": "all"}, "NPROC=all is not a number of ranks"),
    ],
)
def test_a_job_that_cannot_run_says_why_before_any_node_starts(
    tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    done = submit(tmp_path, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr


def test_a_checkout_without_an_environment_says_how_to_make_one(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "train_rl.py").touch()
    done = submit(tmp_path, SLURM_SUBMIT_DIR=str(tmp_path), TORCHRUN="")
    assert (
        done.returncode == 2 and "There is no .venv/bin/torchrun. Run make install" in done.stderr
    )


def test_outside_of_slurm_it_says_how_it_is_submitted(tmp_path: Path) -> None:
    helped = start(tmp_path, "--help")
    assert helped.returncode == 0
    assert "sbatch --nodes=2 launch/slurm/train_rl.sbatch experiment=quickstart" in helped.stdout
    done = start(tmp_path, "experiment=quickstart")
    assert (
        done.returncode == 2
        and "This is no Slurm job" in done.stderr
        and "unbound" not in done.stderr
    )
