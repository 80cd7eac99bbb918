"""The Slurm script over two nodes of this machine, with Slurm's commands replaced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_rl.records.past_run import read_metrics
from megatron_rl.records.starts import read_starts
from tests.lab.faults.evidence import digest_weights
from tests.support.exactness import EXACT
from tests.support.jobs import ROOT, start_job
from tests.support.node_jobs import metrics_without_places, settings_of
from tests.support.nodes import Node, Nodes, open_nodes

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]
STEPS = 6
SETTINGS = (
    "parallel=ep2",
    f"train.total_steps={STEPS}",
    "run.checkpoint_every=1",
    "run.save_weights=true",
    "logger.progress=true",
)
MAX_SECONDS = 90.0
_STEP_SECONDS = 400.0
_SCONTROL = """#!/bin/sh
here=$(dirname "$0")
case $1 in
show) cat "$here/names" ;;
requeue) touch "$here/requeue" ;;
esac
"""
# One task on each node. If one fails, the others get SIGTERM, and SIGKILL after Slurm's KillWait.
_SRUN = """#!{python}
import json, subprocess, sys, time
from pathlib import Path
import psutil

entries = json.loads(Path(__file__).with_name("entries").read_text())
tasks = [subprocess.Popen([*entry, *sys.argv[2:]]) for entry in entries]
while not any(task.poll() for task in tasks) and None in [task.poll() for task in tasks]:
    time.sleep(0.1)
for task in tasks:
    if task.poll() is None:
        tree = psutil.Process(task.pid).children(recursive=True)
        tree[0].terminate()
        for process in psutil.wait_procs(tree, 30)[1]:
            process.kill()
sys.exit(max(abs(task.wait()) for task in tasks))
"""


class NodeSlurm:
    """A job of the real Slurm script over nodes. Its requeues are counted."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.restarts = 0
        for name, text in (("scontrol", _SCONTROL), ("srun", _SRUN.format(python=sys.executable))):
            (directory / name).write_text(text)
            (directory / name).chmod(0o755)

    @property
    def output(self) -> str:
        return (self.directory / "log").read_text()[-6000:]

    def start(self, nodes: Sequence[Node], *overrides: str) -> subprocess.Popen[str]:
        """Start the job on nodes. The first one is where the ranks meet."""
        (self.directory / "names").write_text("\n".join(node.name for node in nodes) + "\n")
        (self.directory / "entries").write_text(json.dumps([node.entry() for node in nodes]))
        slurm = {
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_NODELIST": "node-[1-3]",
            "SLURM_JOB_NUM_NODES": str(len(nodes)),
            "SLURM_JOB_ID": "4711",
            "SLURM_RESTART_COUNT": str(self.restarts),
            "TORCHRUN": str(Path(sys.executable).with_name("torchrun")),
            "NPROC": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": "/var/tmp",
            "PATH": f"{self.directory}:{os.environ['PATH']}",
        }
        with (self.directory / "log").open("a") as log:
            return subprocess.Popen(
                ["bash", str(ROOT / "launch/slurm/train_rl.sbatch"), *overrides],
                env=os.environ | slurm,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def take_requeue(self) -> bool:
        """True if the last job was queued again."""
        mark = self.directory / "requeue"
        if not mark.exists():
            return False
        mark.unlink()
        self.restarts += 1
        return True


def kill_in_job(
    slurm: NodeSlurm, job: subprocess.Popen[str], victim: Node, checkpoint: Path
) -> None:
    """Kill a node once there is a checkpoint, and wait until the job is queued again."""
    deadline = time.monotonic() + _STEP_SECONDS
    while not checkpoint.exists():
        assert job.poll() is None and time.monotonic() < deadline, slurm.output
        time.sleep(0.1)
    moment = time.monotonic()
    victim.kill()
    job.wait(timeout=MAX_SECONDS)
    assert slurm.take_requeue(), slurm.output
    print(f"| SIGKILL {victim.name} | queued again after {time.monotonic() - moment:.0f} s |")


def assert_nothing_runs(nodes: Nodes, victim: str) -> None:
    """No engine of the earlier start is left on the other nodes."""
    names = [p.name() for node in nodes if node.name != victim for p in node.processes()]
    assert names == []


def assert_equal(run: Path, reference: Path) -> None:
    """Compare the steps, metrics and weights of two runs."""
    assert [record["step"] for record in read_metrics(run)] == list(range(STEPS + 1))
    assert metrics_without_places(run) == metrics_without_places(reference)
    assert digest_weights(run) == digest_weights(reference) != ""


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    """Give the directory of an undisturbed run on one node."""
    job = start_job(tmp_path / "one-node", *SETTINGS, "engine.count=2", ranks=2)
    output, _ = job.communicate(timeout=900)
    assert job.returncode == 0, output[-4000:]
    return tmp_path / "one-node/job"


def test_slurm_requeues_a_run_whose_node_dies_and_it_ends_exactly(
    tmp_path: Path, can_have_nodes: None, reference: Path
) -> None:
    """A dead node is replaced: first rank 0's node, then the node where the ranks meet."""
    root = tmp_path / "shared"
    root.mkdir()
    run = root / "job"
    overrides = settings_of(root, *SETTINGS, "run.resume=auto")
    slurm = NodeSlurm(root)
    with open_nodes(tmp_path, "node-1", "node-2", "node-3") as nodes:
        one, two, three = nodes
        for step, (victim, other) in ((1, (one, two)), (3, (three, two))):
            job = slurm.start([victim, other], *overrides)
            kill_in_job(slurm, job, victim, run / f"checkpoints/iter_{step:07d}")
            assert_nothing_runs(nodes, victim.name)
            victim.boot()
        job = slurm.start([one, two], *overrides)
        assert job.wait(timeout=900) == 0, slurm.output
        assert not slurm.take_requeue()
    assert_equal(run, reference)
    starts = read_starts(run)
    assert [start.host for start in starts] == ["node-1", "node-2", "node-1"]
    assert [start.end and start.end.code for start in starts] == [7, 7, None]
