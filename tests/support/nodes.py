"""Nodes of a cluster on this machine: namespaces that a router joins.

A node has its own processes, host name, network, /dev/shm and TMPDIR, and shares the files of this
machine with the others. It needs root, and ip, tc, unshare and nsenter (the Debian packages
iproute2 and util-linux). Their addresses exist only within the namespaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

_COMMANDS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_PR_SET_PDEATHSIG = 1
_END_SECONDS = 20.0
# One of everything that nodes need
_TRIAL = """
echo 1 > /proc/sys/net/ipv4/ip_forward
ip link add veth1 type veth peer veth2
tc qdisc add dev veth1 root tbf rate 10mbit burst 64k latency 50ms
ip rule add ipproto tcp dport 1 blackhole
mount -t tmpfs tmpfs /dev/shm
echo trial > /proc/sys/kernel/hostname
"""
# The first process of a node. It collects those whose parents have ended.
_INIT = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
print("ready", flush=True)
while True:
    signal.pause()
"""
_LIMIT = ("tbf", "burst", "64k", "latency", "50ms", "rate")


def reason_without_nodes() -> str:
    """Return why this machine can have no nodes, empty if it can."""
    if sys.platform != "linux":
        return "namespaces need Linux"
    if os.geteuid() != 0:
        return "namespaces need root"
    for command, package in _COMMANDS.items():
        if shutil.which(command) is None:
            return f"{command} is missing: apt-get install {package}"
    unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--mount-proc"]
    trial = subprocess.run(
        [*unshare, "sh", "-ec", _TRIAL], capture_output=True, text=True, check=False
    )
    return "" if trial.returncode == 0 else f"no namespaces here: {trial.stderr.strip()}"


class Node:
    """One node, which runs from its start.

    name: its host name. index: its number from 1, and the third part of its address.
    """

    def __init__(self, name: str, index: int, hosts: Path) -> None:
        self.name = name
        self.index = index
        self.address = f"10.99.{index}.1"
        self.port = f"port{index}"
        self._hosts = hosts
        self._network = _hold_network()
        self._init: subprocess.Popen[str] | None = None

    @property
    def network(self) -> int:
        """The process that holds the network of the node, also while the node is off."""
        return self._network.pid

    def start(
        self, *command: str, environment: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[str]:
        """Start a command on the node, with a TMPDIR of the node.

        options: of `subprocess.Popen`. The returned process is outside the node. It ends when
        the command ends, with its code, or with -9 if the node was killed.
        """
        return subprocess.Popen(
            [*self.entry(), *command],
            env={**os.environ, **(environment or {}), "TMPDIR": "/var/tmp"},
            text=True,
            **options,
        )

    def run(self, *command: str, seconds: float = 60.0) -> str:
        """Run a command on the node, and return its output. Raises `CalledProcessError`."""
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output, _ = process.communicate(timeout=seconds)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output)
        return output

    def processes(self) -> list[psutil.Process]:
        """All processes of the node but its first one."""
        if self._init is None:
            return []
        init = self._init_pid()
        space = os.readlink(f"/proc/{init}/ns/pid")
        processes = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space and process.pid != init:
                    processes.append(process)
        return processes

    def boot(self) -> None:
        """Start the node, without a process of an earlier time and with an empty /dev/shm."""
        assert self._init is None, f"{self.name} runs"
        script = f"""
            mount -t tmpfs tmpfs /dev/shm
            mount -t tmpfs -o mode=1777 tmpfs /var/tmp
            mount --bind {self._hosts} /etc/hosts
            echo {self.name} > /proc/sys/kernel/hostname
            exec {sys.executable} -c '{_INIT}'
        """
        spaces = ["--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        self._init = subprocess.Popen(
            [*_in_network(self.network), "unshare", *spaces, "sh", "-ec", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )
        assert self._init.stdout is not None and self._init.stderr is not None
        if self._init.stdout.readline() != "ready\n":
            raise OSError(f"{self.name} does not start: {self._init.stderr.read()}")

    def kill(self) -> None:
        """Kill all processes at once (SIGKILL). The kernel still answers for them."""
        assert self._init is not None, f"{self.name} is off"
        processes = self.processes()
        os.kill(self._init_pid(), signal.SIGKILL)
        self._init.communicate(timeout=_END_SECONDS)
        self._init = None
        _, alive = psutil.wait_procs(processes, _END_SECONDS)
        assert alive == [], f"{self.name} is not dead"

    def close(self) -> None:
        """Remove the node."""
        if self._init is not None:
            self.kill()
        self._network.kill()
        self._network.wait()

    def entry(self) -> list[str]:
        """Return the command that runs the command after it on the node, until the next boot."""
        assert self._init is not None, f"{self.name} is off"
        spaces = ["--net", "--mount", "--uts", "--ipc", "--pid"]
        return [
            "nsenter",
            "--target",
            str(self._init_pid()),
            *spaces,
            f"--wdns={os.getcwd()}",
            "--",
        ]

    def _init_pid(self) -> int:
        assert self._init is not None
        return int(psutil.Process(self._init.pid).children()[0].pid)


class Nodes:
    """Nodes and the router between them."""

    def __init__(self, directory: Path, *names: str) -> None:
        self._hosts = directory / "hosts"
        self._router = _hold_network()
        self._write("/proc/sys/net/ipv4/ip_forward", "1")
        self._nodes: dict[str, Node] = {}
        addresses = [f"10.99.{number}.1 {name}" for number, name in enumerate(names, 1)]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *addresses]) + "\n")
        for number, name in enumerate(names, 1):
            self._nodes[name] = Node(name, number, self._hosts)
            self._connect(self._nodes[name])
            self._nodes[name].boot()

    def __getitem__(self, name: str) -> Node:
        return self._nodes[name]

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def limit(self, node: Node, megabits: float) -> None:
        """Limit what a node receives and what it sends to so many megabits a second each."""
        self._tc(self._router.pid, node.port, *_LIMIT, f"{megabits}mbit")
        self._tc(node.network, "eth0", *_LIMIT, f"{megabits}mbit")

    def cut(self, node: Node) -> None:
        """Take a node's link down. Nobody is told: what is sent to it is lost."""
        self._ip("rule", "add", "priority", "10", "to", node.address, "blackhole")
        self._ip("link", "set", node.port, "down")

    def join(self, node: Node) -> None:
        """Take a node's link up again."""
        self._ip("link", "set", node.port, "up")
        self._ip("rule", "delete", "priority", "10", "to", node.address, "blackhole")

    def cut_ports(self, ports: Sequence[int]) -> None:
        """Lose all packets of TCP to and from these ports that pass the router."""
        for port in ports:
            for end in ("dport", "sport"):
                packets = ("ipproto", "tcp", end, str(port))
                self._ip("rule", "add", "priority", "20", *packets, "blackhole")

    def join_ports(self) -> None:
        """Let the packets of all ports pass again."""
        while "20:" in self._ip("rule", "list"):
            self._ip("rule", "delete", "priority", "20")

    def power_off(self, node: Node) -> None:
        """End a node as a power failure does: nobody hears of it."""
        self.cut(node)
        node.kill()

    def power_on(self, node: Node) -> None:
        """Start a node again after a power failure."""
        self.join(node)
        node.boot()

    def close(self) -> None:
        """End all processes of all nodes, and remove their networks."""
        for node in self:
            node.close()
        self._router.kill()
        self._router.wait()

    def _connect(self, node: Node) -> None:
        """Join a node to the router."""
        gateway = f"10.99.{node.index}.254"
        self._ip(
            "link", "add", node.port, "type", "veth", "peer", "eth0", "netns", str(node.network)
        )
        self._ip("address", "add", f"{gateway}/24", "dev", node.port)
        self._ip("link", "set", node.port, "up")
        for words in (
            ("address", "add", f"{node.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
            ("route", "add", "default", "via", gateway),
        ):
            _call(*_in_network(node.network), "ip", *words)

    def _ip(self, *words: str) -> str:
        return _call(*_in_network(self._router.pid), "ip", *words)

    def _tc(self, network: int, device: str, *words: str) -> None:
        _call(*_in_network(network), "tc", "qdisc", "replace", "dev", device, "root", *words)

    def _write(self, path: str, text: str) -> None:
        _call(*_in_network(self._router.pid), "sh", "-c", f"echo {text} > {path}")


@contextlib.contextmanager
def open_nodes(directory: Path, *names: str) -> Iterator[Nodes]:
    """Open nodes with these host names. directory: for a file that all of them read."""
    nodes = Nodes(directory, *names)
    try:
        yield nodes
    finally:
        nodes.close()


def _hold_network() -> subprocess.Popen[str]:
    """Start a process that holds a new network. It ends with this one."""
    process = subprocess.Popen(
        ["unshare", "--net", "sleep", "infinity"], text=True, preexec_fn=_end_with_parent
    )
    host_network = os.readlink("/proc/self/ns/net")
    deadline = time.monotonic() + _END_SECONDS
    while os.readlink(f"/proc/{process.pid}/ns/net") == host_network:
        assert time.monotonic() < deadline, "unshare does not start"
        time.sleep(0.01)
    return process


def _in_network(pid: int) -> list[str]:
    return ["nsenter", "--target", str(pid), "--net", "--"]


def _call(*command: str) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
