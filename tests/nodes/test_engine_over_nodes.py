"""A run whose engine is over both of its nodes: one of its servers is killed, and all start again.

`pytest -rP tests/nodes/test_engine_over_nodes.py` prints the seconds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_rl.records.past_run import read_metrics
from tests.support.exactness import EXACT
from tests.support.jobs import command_line, last_step, start_job
from tests.support.node_jobs import FAULT_METRICS, NodeJob, assert_equal
from tests.support.nodes import Node, Nodes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.chaos,
    pytest.mark.engine,
    pytest.mark.distributed,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        not EXACT, reason="MKL's sums depend on the batch on a processor without AVX-512"
    ),
]
# The fault strikes in step 3, and the engine serves again some steps later
STEPS = 6
SERVER = "sglang.launch_server"
SCHEDULER = "sglang::scheduler"
# Whose server is killed
CASES = [(dtype, node) for dtype in ("float32", "bfloat16") for node in ("node-1", "node-2")]


def settings_of(dtype: str) -> list[str]:
    return [
        "parallel=ep2",
        f"train.total_steps={STEPS}",
        f"model.dtype={dtype}",
        f"engine.dtype={dtype}",
        "engine.tp=2",
        "sync.audit_every=1",
        "run.save_weights=true",
        "logger.progress=true",
    ]


def undisturbed_run(root: Path, dtype: str) -> Path:
    """The directory of a run on one node, with an engine of two ranks there."""
    job = start_job(root, *settings_of(dtype), ranks=2)
    output, _ = job.communicate(timeout=900)
    assert job.returncode == 0, output[-4000:]
    return root / "job"


class Server(NamedTuple):
    """The engine's server on a node. address: where it met the other one."""

    pid: int
    address: str


def server_of(job: NodeJob, node: Node) -> Server:
    """Find the engine's server on a node."""
    (process,) = [
        process for process in job.find(node, SERVER) if "--nnodes=2" in process.cmdline()
    ]
    address = re.search(r"--dist-init-addr=(\S+)", command_line(process))
    assert address is not None
    return Server(process.pid, address[1])


def is_synced_after(job: NodeJob, step: int) -> bool:
    """True once a later step has given the engine its weights."""
    record = read_metrics(job.run)[-1]
    return last_step(job.run / "metrics.jsonl") > step and record["sync/engines"] == 1


@pytest.mark.parametrize(("dtype", "victim"), CASES)
def test_an_engine_over_two_nodes_is_replaced_whole(
    nodes: Nodes, tmp_path: Path, dtype: str, victim: str
) -> None:
    (root := tmp_path / "shared").mkdir()
    job = NodeJob(root, [*nodes], *settings_of(dtype), "engine.nodes_per_engine=2")
    job.wait_for_step(1)
    earlier = [server_of(job, node) for node in nodes]
    (process,) = job.find(nodes[victim], SCHEDULER)
    with job.hold("sampling"):
        process.kill()
        step = last_step(job.run / "metrics.jsonl")
    seconds = job.wait_until(lambda: is_synced_after(job, step), 600)
    print(f"| {dtype} | SIGKILL of the server on {victim} | next sync after {seconds:.0f} s |")
    later = [server_of(job, node) for node in nodes]
    require_new_servers(earlier, later)
    require_one_replacement(job)
    reference = undisturbed_run(tmp_path / "one-node", dtype)
    assert_equal(job.run, reference, STEPS, except_for=(*FAULT_METRICS, "sync/audit_mismatches"))
    assert [process.name() for node in nodes for process in node.processes()] == []


def require_new_servers(earlier: list[Server], later: list[Server]) -> None:
    """Require that servers of all nodes were replaced, and met at another place."""
    assert {server.pid for server in earlier}.isdisjoint(server.pid for server in later)
    (first_address,) = {server.address for server in earlier}
    (second_address,) = {server.address for server in later}
    assert first_address != second_address


def require_one_replacement(job: NodeJob) -> None:
    """Wait for the end of the run. Its engine was replaced once, and held what it was sent."""
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert job.output.count("starting it again") == 1
    assert len(re.findall(r"engine 0 of node 0 \(\S+\) serves\n", job.output)) == 1
    for record in read_metrics(job.run):
        if record["sync/engines"]:
            assert record["sync/audit_mismatches"] == 0
            assert (record["sync/audit_compared"] or 0) > 0
