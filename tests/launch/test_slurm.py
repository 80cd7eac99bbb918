"""The Slurm script's command line, with Slurm's own commands replaced by ones that show what they were given."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def submit(directory: Path, *overrides: str, **environment: str) -> list[str]:
    for name, body in (("scontrol", 'echo node-7; echo node-8; echo "$@" >&2'), ("srun", 'printf "%s\\n" "$@"')):
        command = directory / name
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_NODELIST": "node-[7-8]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_ID": "123456",
        "PATH": f"{directory}:{os.environ['PATH']}",
    }
    done = subprocess.run(
        ["bash", str(ROOT / "launch/slurm/train_rl.sbatch"), *overrides],
        env={**slurm, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "show hostnames node-[7-8]" in done.stderr
    return done.stdout.splitlines()


def test_every_node_meets_at_the_first_one(tmp_path: Path) -> None:
    words = submit(tmp_path, "parallel=ep8", "run.name=a b")
    assert words[:2] == ["--kill-on-bad-exit=1", ".venv/bin/torchrun"]
    assert {"--nnodes=2", "--nproc-per-node=4", "--rdzv-endpoint=node-7:23456", "--rdzv-id=123456"} < set(words)
    assert words[-3:] == ["launch/train_rl.py", "parallel=ep8", "run.name=a b"]


def test_ranks_and_environment_can_be_chosen(tmp_path: Path) -> None:
    words = submit(tmp_path, NPROC="6", TORCHRUN="/opt/venv/bin/torchrun")
    assert words[1] == "/opt/venv/bin/torchrun" and "--nproc-per-node=6" in words
