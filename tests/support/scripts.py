"""Starts the scripts of `launch/` as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ROOT / "launch"


def start_script(
    name: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `launch/NAME.py` in `cwd` and wait for its end."""
    return _run([str(LAUNCH / f"{name}.py"), *arguments], cwd, environment)


def start_gpu_check(
    *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the command of `make gpu-check` in `cwd` and wait for its end."""
    return _run([str(ROOT / "tests/lab/gpu_check"), *arguments], cwd, environment)


def start_module(
    name: str, *arguments: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `python -m NAME` in the root of the repository and wait for its end."""
    return _run(["-m", name, *arguments], ROOT, environment)


def _run(
    arguments: list[str], cwd: Path, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
