"""Nodes on this machine are as far apart as machines are."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import nodes as support
from tests.support.nodes import Node, Nodes, open_nodes

pytestmark = pytest.mark.slow

PORTS = (7001, 7002)
# Counts the bytes of each connection, and prints their number when a connection is quiet
SERVER = """
import socket, sys
listener = socket.create_server(("", int(sys.argv[1])))
print("ready", flush=True)
connection, _ = listener.accept()
count = 0
while part := connection.recv(1 << 20):
    count += len(part)
    if part.endswith(b"."):
        print(count, flush=True)
"""
# Sends as many bytes as each line of its input says
CLIENT = """
import socket, sys
connection = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30)
for line in sys.stdin:
    connection.sendall(b"x" * (int(line) - 1) + b".")
"""


class Flow:
    """A connection from one node to another."""

    def __init__(self, sender: Node, receiver: Node, port: int) -> None:
        pipe = subprocess.PIPE
        program = (sys.executable, "-c")
        self.server = receiver.start(*program, SERVER, str(port), stdout=pipe)
        self.read()
        words = (CLIENT, receiver.name, str(port))
        self.client = sender.start(*program, *words, stdin=pipe)

    def send(self, nbytes: int) -> None:
        assert self.client.stdin is not None
        self.client.stdin.write(f"{nbytes}\n")
        self.client.stdin.flush()

    def read(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def seconds(self, nbytes: int) -> float:
        """The time until so many bytes have arrived."""
        start = time.monotonic()
        self.send(nbytes)
        self.read()
        return time.monotonic() - start


def test_a_node_has_its_own_name_address_processes_and_files(nodes: Nodes) -> None:
    outputs = {}
    for node in nodes:
        command = "hostname; getent hosts $(hostname) | cut -d' ' -f1; touch /dev/shm/x $TMPDIR/y"
        outputs[node.name] = node.run("sh", "-c", command).split()
    assert outputs == {"node-1": ["node-1", "10.99.1.1"], "node-2": ["node-2", "10.99.2.1"]}
    one, two = nodes
    one.run("touch", "/dev/shm/only-one", "/var/tmp/only-one")
    assert two.run("ls", "/dev/shm", "/var/tmp").split() == ["/dev/shm:", "x", "/var/tmp:", "y"]
    assert not Path("/dev/shm/only-one").exists()
    sleep = one.start("sleep", "60")
    assert "sleep 60" not in two.run("ps", "ax")
    sleep.kill()


def test_all_processes_of_a_killed_node_end_and_its_files_are_gone(nodes: Nodes) -> None:
    one, two = nodes
    script = "setsid sleep 61 & sleep 62 & touch /dev/shm/x; echo ready; wait"
    tree = one.start("sh", "-c", script, stdout=subprocess.PIPE)
    other = two.start("sleep", "63")
    assert tree.stdout is not None and tree.stdout.readline() == "ready\n"
    assert len(one.processes()) == 3
    one.kill()
    assert tree.wait(10) == -9 and one.processes() == []
    assert other.poll() is None
    one.boot()
    assert one.run("ls", "/dev/shm") == ""


def test_peers_hear_of_a_kill_and_not_of_a_power_failure(nodes: Nodes) -> None:
    one, two = nodes
    script = f"import socket; c = socket.create_connection(('{two.name}', 7001)); "
    script += "c.settimeout(10); print('ready', flush=True); print(repr(c.recv(1)))"
    ends = []
    for strike in (two.kill, lambda: nodes.power_off(two)):
        server = two.start(sys.executable, "-c", SERVER, "7001", stdout=subprocess.PIPE)
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        client = one.start(
            sys.executable, "-c", script, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert client.stdout is not None and client.stdout.readline() == "ready\n"
        strike()
        ends.append(client.communicate(timeout=60)[0].strip().splitlines()[-1])
        if not ends[1:]:
            two.boot()
    nodes.power_on(two)
    assert ends == ["b''", "TimeoutError: timed out"]
    assert two.run("hostname") == "node-2\n"


def test_a_connection_outlives_a_link_that_is_down_for_seconds(nodes: Nodes) -> None:
    one, two = nodes
    flow = Flow(one, two, PORTS[0])
    assert flow.seconds(1000) < 5
    nodes.cut(two)
    start = time.monotonic()
    flow.send(1000)
    time.sleep(2)
    nodes.join(two)
    assert flow.read() == "2000"
    assert 2 < time.monotonic() - start < 10


def test_ports_are_cut_alone(nodes: Nodes) -> None:
    one, two = nodes
    flows = [Flow(one, two, port) for port in PORTS]
    for flow in flows:
        flow.seconds(10)
    nodes.cut_ports([PORTS[0]])
    flows[0].send(10)
    assert flows[1].seconds(10) < 1
    time.sleep(1)
    start = time.monotonic()
    nodes.join_ports()
    assert flows[0].read() == "20"
    assert 0.05 < time.monotonic() - start < 5


def best_seconds(flow: Flow, nbytes: int) -> float:
    """Return the shortest of three times: other processes may hold one up."""
    return min(flow.seconds(nbytes) for _ in range(3))


@pytest.mark.nightly
@pytest.mark.parametrize("megabits", [8, 40])
def test_a_limited_link_is_as_slow_as_it_says(nodes: Nodes, megabits: int) -> None:
    """Both directions: what the node receives, and what it sends."""
    one, two = nodes
    num_megabits = 12
    nbytes = num_megabits * 10**6 // 8
    flows = (Flow(one, two, PORTS[0]), Flow(two, one, PORTS[1]))
    assert [best_seconds(flow, nbytes) < 0.3 for flow in flows] == [True, True]
    nodes.limit(two, megabits)
    for flow in flows:
        rate = num_megabits / best_seconds(flow, nbytes)
        assert 0.75 * megabits < rate < 1.25 * megabits


def test_nothing_is_left_of_nodes(tmp_path: Path, can_have_nodes: None) -> None:
    with open_nodes(tmp_path, "node-1", "node-2") as nodes:
        process = nodes["node-1"].start("sleep", "64")
        holders = [node.network for node in nodes]
    assert process.wait(10) == -9
    assert [pid for pid in holders if Path(f"/proc/{pid}").exists()] == []
    links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True).stdout
    assert "port1" not in links


def test_a_machine_without_the_means_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.os, "geteuid", lambda: 1000)
    assert support.reason_without_nodes() == "namespaces need root"
    monkeypatch.setattr(support.os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", "")
    assert support.reason_without_nodes() == "ip is missing: apt-get install iproute2"
