"""Ranks of a job as forks of one process that has imported Megatron, which takes seconds.

As a script: `python -m tests.support.forked_ranks`. It reads a `RankRequest` as JSON from each line
of its input, and answers with the exit code of the job. Its forks have what torchrun sets for the
ranks of one node, without torchrun's own store.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_bridge.server.ports import choose_port

ROOT = Path(__file__).resolve().parents[2]
# Seconds for which the other ranks of a rank that has failed may report why they fail
_GRACE_SECONDS = 5
TIMED_OUT = 124
# What most scripts import
MODULES = ("megatron_rl.run.build_worker", "tests.support.policies")


@dataclass(frozen=True)
class RankRequest:
    """A script, its arguments, its number of ranks, and the file for their output.

    timeout: in seconds. environment: the variables of the ranks.
    """

    script: str
    arguments: list[str]
    ranks: int
    output: str
    timeout: float
    environment: dict[str, str]


class RankServer:
    """The process that forks the ranks. It ends with this process."""

    def __init__(self) -> None:
        path = f"{ROOT}:{ROOT / 'kernels'}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_ranks"],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, request: RankRequest) -> int:
        """Run a script on its ranks, and return the first exit code that is not 0."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(request)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process that forks the ranks has ended"
        return int(answer)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


def fork_ranks(request: RankRequest, port: int) -> int:
    """Fork the ranks and wait for them. Only this process returns, with their exit code."""
    pids = set()
    for rank in range(request.ranks):
        pid = os.fork()
        if pid == 0:
            be_rank(request, rank, port)
        pids.add(pid)
    deadline = time.monotonic() + request.timeout
    code = 0
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            pids.discard(pid)
            rank_code = os.waitstatus_to_exitcode(status)
            if rank_code and not code:
                code = rank_code
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        elif time.monotonic() > deadline:
            code = code or TIMED_OUT
            for other in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    return code


def be_rank(request: RankRequest, rank: int, port: int) -> None:
    """Run the script as a rank, and end this process."""
    output = os.open(request.output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": request.ranks,
        "LOCAL_WORLD_SIZE": request.ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.clear()
    os.environ.update(request.environment | {name: str(value) for name, value in place.items()})
    sys.argv = [request.script, *request.arguments]
    sys.path.insert(0, str(Path(request.script).parent))
    runpy.run_path(request.script, run_name="__main__")
    sys.exit()


def main() -> None:
    """Import what scripts import, and run jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports may print
    from megatron_rl.mcore import compat

    compat.install()
    for name in MODULES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        code = fork_ranks(RankRequest(**json.loads(line)), choose_port("127.0.0.1"))
        answers.write(f"{code}\n")
        answers.flush()


if __name__ == "__main__":
    main()
