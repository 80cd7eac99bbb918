"""The scripts of `launch/`, loaded as modules or started as a user starts them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

LAUNCH = Path(__file__).resolve().parents[2] / "launch"


def load_script(name: str) -> ModuleType:
    """A script's module; nothing of it is run."""
    spec = importlib.util.spec_from_file_location(f"launch_{name}", LAUNCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def start_script(
    name: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(LAUNCH / f"{name}.py"), *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
