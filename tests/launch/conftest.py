"""`launch/comparison/__main__.py`, whose runs are stood for."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.support.comparisons import Launcher
from tests.support.scripts import load_script


@pytest.fixture(scope="session")
def script() -> ModuleType:
    return load_script("compare_runs")


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    launched = Launcher()
    replaced = SimpleNamespace(Popen=launched, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("launch.comparison.runner.subprocess", replaced)
    return launched


@pytest.fixture
def compare(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    monkeypatch.delenv("NPROC", raising=False)

    def run(*arguments: str) -> int:
        code: int = script.main(["--out", str(tmp_path / "out"), *arguments])
        return code

    return run
