"""`launch/preflight.py` finds what is wrong with a machine."""

import importlib.util
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_rl.config.facts import LaunchFacts
from megatron_rl.config.schema import EngineSettings

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "preflight.py"


@pytest.fixture(scope="module")
def preflight() -> ModuleType:
    spec = importlib.util.spec_from_file_location("preflight", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["preflight"] = module
    spec.loader.exec_module(module)
    return module


def test_pinned_environment_passes_and_another_version_fails(preflight: ModuleType) -> None:
    constraints = (SCRIPT.parents[1] / "requirements" / "constraints.txt").read_text()
    assert [check.name for check in preflight.check_versions(constraints) if not check.passed] == []
    other = constraints.replace("\ntorch==2.13.0\n", "\ntorch==2.0.0\n")
    assert [check.name for check in preflight.check_versions(other) if not check.passed] == ["torch"]


def test_engines_that_do_not_answer(preflight: ModuleType) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        engine = EngineSettings(mode="external", urls=[url])
        assert [check.passed for check in preflight.check_external_engines(engine)] == [True]
    (check,) = preflight.check_external_engines(engine)
    assert not check.passed
    assert url in str(check) and "Start that server" in str(check)


def test_memory_and_places(preflight: ModuleType, tmp_path: Path) -> None:
    assert preflight.check_memory(EngineSettings(), LaunchFacts()).passed
    assert not preflight.check_memory(EngineSettings(count=10_000), LaunchFacts()).passed
    assert preflight.check_memory(EngineSettings(mode="external", count=10_000), LaunchFacts()).passed
    assert preflight.check_run_root(str(tmp_path / "not" / "yet")).passed
    assert list(tmp_path.iterdir()) == []


def test_little_shared_memory_warns_and_does_not_refuse(preflight: ModuleType, tmp_path: Path) -> None:
    check = preflight.check_shared_memory(str(tmp_path / "missing"))
    assert (check.passed, check.refuses) == (False, False)
    assert str(check).startswith("warn  shared memory: 0.0 GiB free") and "--shm-size" in str(check)
    assert preflight.check_memory(EngineSettings(count=10_000), LaunchFacts()).refuses


def test_script_reports_every_check(tmp_path: Path, checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "experiment=smoke", f"model.path={checkpoint}"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == "ok    configuration: every rule is kept", done.stderr
    assert any("host memory" in line for line in lines)
    assert done.returncode == (2 if "FAIL" in done.stdout else 0)
