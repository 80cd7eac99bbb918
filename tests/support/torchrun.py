"""Runs a script of this test tree on several ranks, as torchrun does.

Where there is no GPU, the ranks are forks of a process that has imported Megatron
(`tests.support.forked_ranks`). CUDA does not work in forks.
"""

import atexit
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.forked_ranks import ROOT, TIMED_OUT, RankRequest, RankServer

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def torchrun(script: Path, *arguments: str, ranks: int, timeout: float = 240) -> str:
    """Run `script` on `ranks` processes and return its output.

    timeout: in seconds.

    A failure of the script fails the test and shows the output.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.NamedTemporaryFile() as file:
        output = Path(file.name)
        if Path("/dev/nvidiactl").exists():
            code = _start_processes([str(script), *arguments], ranks, timeout, environment, output)
        else:
            request = RankRequest(
                str(script), list(arguments), ranks, str(output), timeout, environment
            )
            code = _server().run(request)
        text = output.read_text(errors="replace")
    reason = "took too long" if code == TIMED_OUT else f"ended with {code}"
    assert code == 0, f"{script.name} {arguments} on {ranks} ranks {reason}:\n{text[-6000:]}"
    return text


@functools.cache
def _server() -> RankServer:
    server = RankServer()
    atexit.register(server.close)
    return server


def _start_processes(
    command: list[str], ranks: int, timeout: float, environment: dict[str, str], output: Path
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
