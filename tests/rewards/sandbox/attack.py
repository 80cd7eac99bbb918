"""Runs the programs of `escape_programs.py` against what is outside, and prints the results.

    python -m tests.rewards.sandbox.attack FOLDER strict

`outside` in place of a mode runs the harmless ones without a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import string
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.rewards.sandbox import Limits, Sandbox
from tests.rewards.sandbox.escape_programs import ENDLESS, HARMLESS, HOSTILE

SECRET = "the-secret-of-the-run"


@contextmanager
def targets(folder: Path) -> Iterator[dict[str, object]]:
    """Open what programs attack, as the values of their places. Checks afterwards what they did."""
    os.environ["RUN_KEY"] = SECRET
    free = folder / "free"
    free.mkdir()
    free.chmod(0o777)
    secret = folder / "secret"
    secret.write_text(SECRET)
    name = f"sandbox-{secrets.token_hex(8)}"
    path = str(folder / "socket")
    victim = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(tcp.getsockname())
        servers = [tcp, udp]
        for address, kind in (
            (path, socket.SOCK_STREAM),
            ("\0" + name, socket.SOCK_STREAM),
            (path + ".datagrams", socket.SOCK_DGRAM),
        ):
            server = stack.enter_context(socket.socket(socket.AF_UNIX, kind))
            server.bind(address)
            if kind == socket.SOCK_STREAM:
                server.listen()
            servers.append(server)
        file = os.open(secret, os.O_RDONLY)
        os.set_inheritable(file, True)
        values: dict[str, object] = {
            "port": tcp.getsockname()[1],
            "socket": path,
            "name": name,
            "secret": secret,
            "folder": free,
            "victim": victim.pid,
        }
        try:
            yield values
            values["contacts"] = sum(map(_has_contact, servers))
            values["is_alive"] = victim.poll() is None
            values["new_files"] = [entry.name for entry in free.iterdir()]
        finally:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
            os.close(file)


def _has_contact(server: socket.socket) -> bool:
    server.setblocking(False)
    try:
        if server.type == socket.SOCK_STREAM:
            server.accept()
        else:
            server.recv(1)
    except BlockingIOError:
        return False
    return True


def _fill(program: str, values: dict[str, object]) -> str:
    return string.Template("print('started', flush=True)\n" + program).substitute(values)


async def attack(folder: Path) -> dict[str, object]:
    """Run all programs in a strict sandbox."""
    memory_mb = 150 + secrets.randbelow(100)
    limits = Limits(cpu_s=1, wall_s=120, memory_mb=memory_mb, output_bytes=100_000)
    sandbox = Sandbox(limits)
    short = Sandbox(Limits(cpu_s=1, wall_s=5, memory_mb=memory_mb, output_bytes=100_000))
    isolation = await sandbox.check()
    with targets(folder) as values:
        results = {}
        for name, program in (HARMLESS | HOSTILE | ENDLESS).items():
            box = short if name in ("sleep", "endless_input") else sandbox
            result = await box.run(_fill(program, values))
            results[name] = {
                "output": result.output.decode("utf-8", "replace")[:2000],
                "ending": result.ending.name,
                "code": result.exit_code,
                "processes": _processes(memory_mb),
            }
    return {"results": results, "isolation": str(isolation), **_json(values)}


def _processes(memory_mb: int) -> list[str]:
    """Return the processes of sandboxes that are left, which have this limit as an argument."""
    argument = f"memory={memory_mb * 1024**2}"
    names = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if argument in (process.info["cmdline"] or ()):
            names.append(f"{process.pid} {process.info['status']}")
    return names


def attack_outside(folder: Path) -> dict[str, object]:
    """Run the harmless programs without a sandbox."""
    with targets(folder) as values:
        results = {}
        for name, program in HARMLESS.items():
            command = [sys.executable, "-c", _fill(program, values)]
            process = subprocess.run(
                command, capture_output=True, text=True, check=False, close_fds=False
            )
            results[name] = {"output": process.stdout}
    return {"results": results, **_json(values)}


def _json(values: dict[str, object]) -> dict[str, object]:
    return {name: values[name] for name in ("contacts", "is_alive", "new_files")}


def main() -> None:
    """Run the programs, and print results as JSON, or why they cannot run."""
    folder = Path(sys.argv[1])
    try:
        if sys.argv[2] == "outside":
            print(json.dumps(attack_outside(folder)))
        else:
            print(json.dumps(asyncio.run(attack(folder))))
    except Failure as failure:
        print(json.dumps({"refusal": str(failure)}))


if __name__ == "__main__":
    main()
