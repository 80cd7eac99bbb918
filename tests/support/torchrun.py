"""Runs a script of this test tree on several ranks, as torchrun does.

Where there is no GPU, the ranks are forks of a process that has imported Megatron
(`tests.support.forks`). CUDA does not work in forks.
"""

import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from sglang_bridge.server.ports import choose_port
from tests.support.forks import FORKS

ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMED_OUT = 124
# Seconds for which the other ranks of a rank that has failed may report why they fail
_GRACE_SECONDS = 5


def torchrun(script: Path, *arguments: str, ranks: int, timeout: float = 240) -> str:
    """Run `script` on `ranks` processes and return its output.

    timeout: in seconds.

    A failure of the script fails the test and shows the output.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }
    command = [str(script), *arguments]
    run = _start_processes if Path("/dev/nvidiactl").exists() else _run_forks
    with tempfile.NamedTemporaryFile() as file:
        output = Path(file.name)
        code = run(command, ranks, timeout, environment, output)
        text = output.read_text(errors="replace")
    reason = "took too long" if code == TIMED_OUT else f"ended with {code}"
    assert code == 0, f"{script.name} {arguments} on {ranks} ranks {reason}:\n{text[-6000:]}"
    return text


def _start_processes(
    command: Sequence[str], ranks: int, timeout: float, environment: dict[str, str], output: Path
) -> int:
    """Start the ranks with torchrun, and return its exit code."""
    with output.open("w") as file:
        process = subprocess.run(
            [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", *command],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            check=False,
        )
    return process.returncode


def _run_forks(
    command: Sequence[str], ranks: int, timeout: float, environment: dict[str, str], output: Path
) -> int:
    """Run the ranks as forks, and return the first exit code that is not 0."""
    port = choose_port("127.0.0.1")
    processes: list[BaseProcess] = [
        FORKS.Process(
            target=_be_rank,
            args=(command, environment | _place(rank, ranks, port), output),
            daemon=True,
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        return _wait(processes, timeout)
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _wait(processes: Sequence[BaseProcess], timeout: float) -> int:
    """Wait for the end of ranks, and return the first exit code that is not 0."""
    deadline = time.monotonic() + timeout
    code = 0
    while time.monotonic() < deadline:
        codes = [process.exitcode for process in processes]
        if not code and any(codes):
            code = next(one for one in codes if one)
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if None not in codes:
            return code
        time.sleep(0.02)
    return code or TIMED_OUT


def _place(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's variables of a rank of one node, without those of torchrun's own store."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _be_rank(command: Sequence[str], environment: dict[str, str], output: Path) -> None:
    """Run the script as a rank of the job."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command)
    script = command[0]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
