"""A comparison whose runs are replaced by directories that they would leave."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.lab.comparison.__main__ import main
from tests.support.comparisons import Launcher
from tests.support.configurations import configuration_of


@pytest.fixture(autouse=True)
def composition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the composition of planned runs by the one from memory."""
    monkeypatch.setattr("tests.lab.comparison.variants.compose", configuration_of)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    """Replaces the start of processes in the runner."""
    fake = Launcher()
    module = SimpleNamespace(Popen=fake, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr("tests.lab.comparison.runner.subprocess", module)
    return fake


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command with the output directory `out`."""
    monkeypatch.delenv("NPROC", raising=False)

    def run(*arguments: str) -> int:
        return main(["--out", str(tmp_path / "out"), *arguments])

    return run
