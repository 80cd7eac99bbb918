"""Real runs over several nodes: one torchrun with one rank on each."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.records.past_run import read_metrics
from tests.lab.faults.evidence import digest_weights
from tests.support.comparable import metrics_of
from tests.support.jobs import ROOT, SHORT_RUN, command_line, last_step
from tests.support.nodes import Node

HELD_RUN = "tests/nodes/held_run.py"
_PORT = 29400
_POLL_SECONDS = 0.1
_TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
# Starts its command again until that ends well, as a service manager does
_SERVICE = 'until "$@"; do echo "ended with $?"; sleep 1; done'
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    # Ranks that torchrun starts again on several nodes need a new store
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


# They tell of faults that a run outlives
FAULT_METRICS = (
    "sync/engines",
    "sync/bytes",
    "sync/audit_compared",
    "rollout/engines_left_out",
    "rollout/repeated",
    "account/engine_tokens",
    "account/unaccounted",
)


def assert_equal(
    run: Path, reference: Path, steps: int, *, except_for: tuple[str, ...] = ()
) -> None:
    """Compare the weights and metrics of a run with an undisturbed run's.

    except_for: the metrics that tell of faults.
    """
    assert [record["step"] for record in read_metrics(run)] == list(range(steps + 1))
    assert digest_weights(run) == digest_weights(reference) != ""
    for record, other in zip(
        metrics_without_places(run), metrics_without_places(reference), strict=True
    ):
        names = [n for n in record.keys() | other.keys() if n not in except_for]
        assert {n: record.get(n) for n in names} == {n: other.get(n) for n in names}


def metrics_without_places(run: Path) -> list[dict[str, Any]]:
    """Return the records of a run, without times and without metrics that name an engine."""
    return [
        {name: value for name, value in record.items() if not name.startswith("sync/bytes/")}
        for record in metrics_of(run)
    ]


def settings_of(root: Path, *overrides: str) -> list[str]:
    """The command line of the run `root/job`."""
    return ["experiment=smoke", *SHORT_RUN, f"run.root={root}", "run.name=job", *overrides]


@dataclass(frozen=True)
class Connection:
    """A TCP connection, or a socket that listens. state: as ss prints it."""

    state: str
    port: int
    peer_address: str
    peer_port: int


class NodeJob:
    """A run over nodes that share `root`. Its directory is `root/job`.

    is_service: a torchrun that fails is started again. restarts: how often each torchrun starts its
    ranks again; it finds the other nodes by itself then (c10d).
    """

    def __init__(
        self,
        root: Path,
        nodes: Sequence[Node],
        *overrides: str,
        script: str = HELD_RUN,
        is_service: bool = False,
        restarts: int = 0,
    ) -> None:
        self.root = root
        self.run = root / "job"
        self.nodes = nodes
        self._script = script
        self._overrides = overrides
        self._is_service = is_service
        self._restarts = restarts
        self.launchers: dict[str, subprocess.Popen[str]] = {}
        for node in nodes:
            self.start(node)

    def start(self, node: Node) -> None:
        """Start torchrun on a node."""
        service = ("sh", "-c", _SERVICE, "service") if self._is_service else ()
        with self.log(node).open("a") as log:
            self.launchers[node.name] = node.start(
                *service,
                *_TORCHRUN,
                *self._rendezvous(node),
                "--nproc-per-node=1",
                str(ROOT / self._script),
                *settings_of(self.root, *self._overrides),
                environment=_ENVIRONMENT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def log(self, node: Node) -> Path:
        """The file with the output of a node."""
        return self.root / f"{node.name}.log"

    @property
    def output(self) -> str:
        """The ends of the outputs of all nodes."""
        logs = {node.name: self.log(node).read_text()[-4000:] for node in self.nodes}
        return "\n".join(f"--- {name}\n{text}" for name, text in logs.items())

    @property
    def is_running(self) -> bool:
        """True while torchrun runs on all nodes."""
        return all(launcher.poll() is None for launcher in self.launchers.values())

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> float:
        """Wait until a condition holds, and return the seconds. Raises AssertionError."""
        start = time.monotonic()
        while not condition():
            assert time.monotonic() - start < seconds, f"after {seconds} s:\n{self.output}"
            assert self.is_running or condition(), f"the run ended:\n{self.output}"
            time.sleep(_POLL_SECONDS)
        return time.monotonic() - start

    def wait_for_step(self, step: int, seconds: float = 400.0) -> float:
        """Wait until a step has its record, and return the seconds."""
        return self.wait_until(lambda: last_step(self.run / "metrics.jsonl") >= step, seconds)

    def wait(self, seconds: float = 600.0) -> dict[str, int]:
        """Wait for the end of torchrun on all nodes, and return its codes."""
        deadline = time.monotonic() + seconds
        for name, launcher in self.launchers.items():
            try:
                launcher.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"{name} runs after {seconds} s:\n{self.output}") from error
        return {name: launcher.returncode for name, launcher in self.launchers.items()}

    @contextlib.contextmanager
    def hold(self, place: str, seconds: float = 400.0) -> Iterator[None]:
        """Hold rank 0 at a place of held_run.py for as long as the body runs."""
        mark = self.root / f"at-{place}"
        mark.unlink(missing_ok=True)
        (self.root / f"hold-{place}").touch()
        try:
            self.wait_until(mark.exists, seconds)
            yield
        finally:
            (self.root / f"hold-{place}").unlink()

    def _rendezvous(self, node: Node) -> list[str]:
        """Options with which torchrun finds the other nodes."""
        first = self.nodes[0]
        num_nodes = f"--nnodes={len(self.nodes)}"
        if self._restarts:
            endpoint = f"--rdzv-endpoint={first.name}:{_PORT}"
            limit = f"--max-restarts={self._restarts}"
            return [num_nodes, "--rdzv-backend=c10d", "--rdzv-id=job", endpoint, limit]
        place = f"--node-rank={self.nodes.index(node)}"
        return [num_nodes, place, f"--master-addr={first.address}", f"--master-port={_PORT}"]

    def find(self, node: Node, part: str) -> list[psutil.Process]:
        """The processes of a node with `part` in their command line, without supervisors."""
        return [
            process
            for process in node.processes()
            if part in (words := command_line(process))
            and "sglang_bridge.server.supervise" not in words
        ]

    def connections(self, node: Node, part: str) -> list[Connection]:
        """The connections of a node's processes with `part` in their command line."""
        marks = [f"pid={_pid_within(process)}," for process in self.find(node, part)]
        connections = []
        for line in node.run("ss", "--tcp", "--all", "--numeric", "--processes", "-H").splitlines():
            if any(mark in line for mark in marks):
                state, _, _, place, peer = line.split()[:5]
                address, _, port = peer.rpartition(":")
                own_port = int(place.rpartition(":")[2])
                number = int(port) if port.isdecimal() else 0
                connections.append(Connection(state, own_port, address, number))
        return connections


def _pid_within(process: psutil.Process) -> int:
    """Return the id that a process has on its node."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])
