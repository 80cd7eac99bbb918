"""The environment of its own in which TRL runs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_CONSTRAINTS = Path(__file__).resolve().parents[3] / "requirements/constraints.txt"
# As in requirements/install.sh: a CUDA build of torch declares its own version of triton
_FREE_PACKAGE = "triton=="


def open_environment(directory: Path) -> Path:
    """Return the Python of an environment with TRL and torch, and create it if it is not complete.

    Their versions are those of requirements/constraints.txt.
    """
    constraints = "".join(
        line
        for line in _CONSTRAINTS.read_text().splitlines(keepends=True)
        if not line.startswith(_FREE_PACKAGE)
    )
    python = directory / "bin/python"
    # Written last, so that it tells a complete environment with these versions from any other
    record = directory / "constraints.txt"
    if record.exists() and record.read_text() == constraints:
        return python
    print(f"installing TRL into {directory} (up to 6 GB) ...", file=sys.stderr, flush=True)
    shutil.rmtree(directory, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(constraints)
        file.flush()
        install = [str(python), "-m", "pip", "install", "--quiet", "--constraint", file.name]
        subprocess.run([*install, "trl", "torch"], check=True)
    record.write_text(constraints)
    return python
