"""Runs over two nodes with a rank, an engine and a collector each: they train as one node does.

Nodes are killed and cut off meanwhile. `make test-all TESTS=tests/nodes` runs all of it, and
`-rP` after it prints the seconds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import read_metrics
from megatron_rl.records.starts import read_starts
from tests.support.exactness import EXACT
from tests.support.jobs import last_step, start_job, survivors
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
DTYPES = ("float32", "bfloat16")
SHORT = 3
MEDIUM = 6
LONG = 9
# Long enough for an engine and a collector that are cut off and come back
VERY_LONG = 30
# Until a run has ended, or goes on without the time in which an engine starts
MAX_SECONDS = 90.0
# Waits of ranks and of syncs, where a test waits for them
TIMEOUT = 100.0
TIMEOUTS = (
    f"parallel.timeout_s={TIMEOUT}",
    f"engine.start_timeout_s={TIMEOUT - 1}",
    "sync.timeout_s=20",
)

SHORT_CUT = 5.0
COLLECTOR = "megatron_rl.rollouts.collector"

ReferenceOf = Callable[[str, int], Path]


def settings_of(dtype: str, steps: int) -> list[str]:
    return [
        "parallel=ep2",
        f"train.total_steps={steps}",
        f"model.dtype={dtype}",
        f"engine.dtype={dtype}",
        "run.save_weights=true",
        "logger.progress=true",
    ]


@pytest.fixture(scope="module")
def reference_of(tmp_path_factory: pytest.TempPathFactory, can_have_nodes: None) -> ReferenceOf:
    """Give the directory of an undisturbed run on one node, for each type and number of steps.

    It has two engines, as the two nodes have together. Their number changes no response.
    """

    @functools.cache
    def run(dtype: str, steps: int) -> Path:
        root = tmp_path_factory.mktemp(f"one-node-{dtype}-{steps}")
        job = start_job(root, *settings_of(dtype, steps), "engine.count=2", ranks=2)
        output, _ = job.communicate(timeout=900)
        assert job.returncode == 0, output[-4000:]
        return root / "job"

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The directory that the nodes share."""
    path = tmp_path / "shared"
    path.mkdir()
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_nodes_train_three_steps_as_one_node_does(
    nodes: Nodes, root: Path, reference_of: ReferenceOf, dtype: str
) -> None:
    job = NodeJob(root, [*nodes], *settings_of(dtype, SHORT))
    job.wait_for_step(0)
    for node in nodes:
        kinds = ("held_run.py", "sglang.launch_server", COLLECTOR)
        assert all(job.find(node, kind) for kind in kinds)
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(job.run, reference_of(dtype, SHORT), SHORT)
    assert [process.name() for node in nodes for process in node.processes()] == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_nodes_train_the_same_in_both_orders(nodes: Nodes, root: Path, dtype: str) -> None:
    settings = [
        *settings_of(dtype, SHORT),
        "data.num_train=16",  # so that prompts have histories from the second step on
        "engine.max_running_requests=3",  # few requests at a time, so that their order matters
    ]
    runs = []
    for order in ("submission", "longest"):
        folder = root / order
        folder.mkdir()
        job = NodeJob(folder, [*nodes], *settings, f"rollout.order={order}")
        assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
        runs.append(job.run)
    assert_equal(*runs, SHORT)
    assert read_metrics(runs[0])[-1]["lengths/known"] == 1.0


def processes_of_the_run(node: Node) -> list[psutil.Process]:
    """All processes of a node but those that start torchrun again."""
    return [process for process in node.processes() if process.name() != "sh"]


def end_of_start(run: Path) -> str:
    """The code and reason with which the last start ended."""
    record = read_exit_record(run)
    assert record is not None
    return f"{record.code}: {record.reason}"


def print_row(*cells: object) -> None:
    """Print a row of the table in docs/results/faults.md."""
    print(f"| {' | '.join(map(str, cells))} |")


def kill_and_return(job: NodeJob, node: Node, survivor: Node, place: str) -> str:
    """Kill all processes of a node at once, and start the node again when the run has ended.

    On the other node nothing of the run is left. Returns what the run did and how long it took.
    """
    num_starts = len(read_starts(job.run))
    with job.hold(place):
        last_processes = processes_of_the_run(survivor)
        step = last_step(job.run / "metrics.jsonl")
        moment = time.monotonic()
        node.kill()
    job.launchers.pop(node.name)
    assert survivors(last_processes, MAX_SECONDS) == []
    seconds = time.monotonic() - moment
    end = end_of_start(job.run)
    assert end.startswith(f"{int(ExitCode.PEER_FAILED)}: ")
    node.boot()
    job.start(node)
    until_start = job.wait_until(lambda: len(read_starts(job.run)) > num_starts, MAX_SECONDS)
    until_step = until_start + job.wait_for_step(step + 1)
    return f"{seconds:.0f} s | {end} | {until_start:.0f} s | {until_step:.0f} s"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_run_resumes_once_a_killed_node_is_back(
    nodes: Nodes, root: Path, reference_of: ReferenceOf, dtype: str
) -> None:
    """torchrun is a service of each node. That of the other node waits for the killed one.

    Each kill follows a new checkpoint: a run that fails twice without one is refused.
    """
    one, two = nodes
    settings = [*settings_of(dtype, LONG), "run.checkpoint_every=1", "run.resume=auto"]
    job = NodeJob(root, [one, two], *settings, is_service=True)
    places = ("sampling", "training", "syncing", "saving")
    for number, place in enumerate(places):
        checkpoint = job.run / f"checkpoints/iter_{2 * number + 1:07d}"
        job.wait_until(checkpoint.exists, 400)
        node, survivor = (one, two) if number % 2 else (two, one)
        effect = kill_and_return(job, node, survivor, place)
        print_row(dtype, f"SIGKILL {node.name} while {place}", effect)
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(job.run, reference_of(dtype, LONG), LONG)


def test_torchrun_with_restarts_waits_for_a_killed_node(
    nodes: Nodes, root: Path, reference_of: ReferenceOf
) -> None:
    """The torchrun of the other node goes on, and starts its rank again."""
    one, two = nodes
    settings = [*settings_of("float32", SHORT), "run.checkpoint_every=1", "run.resume=auto"]
    job = NodeJob(root, [one, two], *settings, restarts=3)
    job.wait_until((job.run / "checkpoints/iter_0000001").exists, 400)
    with job.hold("training"):
        two.kill()
    job.launchers.pop(two.name)
    two.boot()
    job.start(two)
    seconds = job.wait_until(lambda: len(read_starts(job.run)) == 2, 300)
    print_row("float32", "SIGKILL node-2, torchrun --max-restarts", f"{seconds:.0f} s")
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(job.run, reference_of("float32", SHORT), SHORT)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_link_that_is_down_for_seconds_changes_nothing(
    nodes: Nodes, root: Path, reference_of: ReferenceOf, dtype: str
) -> None:
    job = NodeJob(root, [*nodes], *settings_of(dtype, LONG), "run.checkpoint_every=1")
    for step, place in enumerate(("sampling", "training", "syncing", "saving"), 1):
        job.wait_for_step(step)
        with job.hold(place):
            nodes.cut(nodes["node-2"])
        time.sleep(SHORT_CUT)
        nodes.join(nodes["node-2"])
        seconds = job.wait_for_step(last_step(job.run / "metrics.jsonl") + 1)
        print_row(dtype, f"link down for {SHORT_CUT:.0f} s while {place}", f"{seconds:.0f} s")
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(job.run, reference_of(dtype, LONG), LONG)


@pytest.mark.parametrize("place", ["sampling", "training"])
def test_a_run_with_a_node_that_is_cut_off_ends_and_resumes(
    nodes: Nodes, root: Path, reference_of: ReferenceOf, place: str
) -> None:
    one, two = nodes
    settings = [*settings_of("float32", LONG), "run.checkpoint_every=1", "run.resume=auto"]
    job = NodeJob(root, [one, two], *settings, *TIMEOUTS, is_service=True)
    job.wait_for_step(2)
    with job.hold(place):
        last_processes = [p for node in nodes for p in processes_of_the_run(node)]
        nodes.cut(two)
        moment = time.monotonic()
    assert survivors(last_processes, TIMEOUT + MAX_SECONDS) == []
    seconds = time.monotonic() - moment
    end = end_of_start(job.run)
    nodes.join(two)
    going_on = job.wait_until(lambda: len(read_starts(job.run)) == 2, 300)
    print_row("float32", f"cut off while {place}", f"{seconds:.0f} s", end, f"{going_on:.0f} s")
    assert end.startswith(f"{int(ExitCode.PEER_FAILED)}: ")
    assert seconds < TIMEOUT + 30
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(job.run, reference_of("float32", LONG), LONG)


def service_ports(job: NodeJob, node: Node) -> list[int]:
    """The ports of a node's engine and collector, and the hub's port.

    The engine reaches rank 0 at the port over which the ranks speak, which has to stay open.
    """
    hub = {c.peer_port for c in job.connections(node, COLLECTOR) if c.state == "ESTAB"}
    parts = ("sglang", COLLECTOR)
    return sorted(hub | {c.port for part in parts for c in job.connections(node, part)})


def is_connected(job: NodeJob, node: Node, peer: Node) -> bool:
    """True if the collector of a node is connected to a peer."""
    connections = job.connections(node, COLLECTOR)
    return any(c.state == "ESTAB" and c.peer_address == peer.address for c in connections)


def test_a_run_goes_on_while_the_engine_and_collector_of_a_node_are_cut_off(
    nodes: Nodes, root: Path, reference_of: ReferenceOf
) -> None:
    """The ranks still reach each other. Both come back with the current weights."""
    one, two = nodes
    settings = settings_of("float32", VERY_LONG)
    job = NodeJob(root, [one, two], *settings, *TIMEOUTS)
    job.wait_for_step(2)
    ports = service_ports(job, two)
    assert len(ports) >= 4 and is_connected(job, two, one)
    nodes.cut_ports(ports)
    seconds = job.wait_for_step(last_step(job.run / "metrics.jsonl") + 2)
    time.sleep(max(0.0, 60 - seconds))
    nodes.join_ports()
    returns = job.wait_until(
        lambda: read_metrics(job.run)[-1]["sync/engines"] == 2 and is_connected(job, two, one), 300
    )
    print_row("float32", "engine and collector cut off", f"{seconds:.0f} s", f"{returns:.0f} s")
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(job.run, reference_of("float32", VERY_LONG), VERY_LONG, except_for=FAULT_METRICS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_engine_and_a_collector_of_the_second_node_are_replaced(
    nodes: Nodes, root: Path, reference_of: ReferenceOf, dtype: str
) -> None:
    # Most requests wait on rank 0: both engines have four slots for a step of 128 rollouts
    job = NodeJob(root, [*nodes], *settings_of(dtype, LONG), "engine.max_running_requests=3")
    for step, part in ((1, COLLECTOR), (3, "sglang::scheduler")):
        job.wait_for_step(step)
        with job.hold("sampling"):
            (process,) = job.find(nodes["node-2"], part)
            process.kill()
        seconds = job.wait_for_step(last_step(job.run / "metrics.jsonl") + 1)
        print_row(dtype, f"SIGKILL {part} of node-2", f"{seconds:.0f} s")
        assert seconds < 60
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(job.run, reference_of(dtype, LONG), LONG, except_for=FAULT_METRICS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_responses_go_on_at_the_other_node_when_an_engine_is_killed(
    nodes: Nodes, root: Path, tmp_path: Path, dtype: str
) -> None:
    """The second node has no other engine. Its collector keeps what it has begun with."""
    settings = [
        *settings_of(dtype, MEDIUM),
        "rollout.max_staleness=1",
    ]
    reference = start_job(tmp_path, *settings, "engine.count=2", ranks=2)
    output, _ = reference.communicate(timeout=900)
    assert reference.returncode == 0, output[-4000:]
    job = NodeJob(root, [*nodes], *settings)
    job.wait_for_step(2)
    with job.hold("sampling"):
        (process,) = job.find(nodes["node-2"], "sglang::scheduler")
        process.kill()
    seconds = job.wait_for_step(last_step(job.run / "metrics.jsonl") + 1)
    print_row(dtype, "SIGKILL the only engine of node-2", f"{seconds:.0f} s")
    assert job.wait() == {"node-1": 0, "node-2": 0}, job.output
    assert_equal(
        job.run, tmp_path / "job", MEDIUM, except_for=(*FAULT_METRICS, "rollout/in_flight")
    )
    records = read_metrics(job.run)
    assert min(record["sync/engines"] for record in records if "sync/engines" in record) == 1
    assert sum(record.get("rollout/repeated", 0) for record in records) == 0
