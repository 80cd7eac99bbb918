"""Runs a script of this test tree under the real torchrun."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def torchrun(script: Path, *arguments: str, ranks: int, timeout: float = 240) -> str:
    """Run `script` on `ranks` processes and return its output.

    timeout: in seconds.

    A failure of the script fails the test and shows the output.
    """
    environment = os.environ | {
        "PYTHONPATH": f"{TESTS.parent}:{TESTS.parent / 'kernels'}",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [*TORCHRUN, "--standalone", f"--nproc-per-node={ranks}", str(script), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, (
        f"torchrun {script.name} {arguments} failed:\n{result.stdout[-6000:]}"
    )
    return result.stdout
