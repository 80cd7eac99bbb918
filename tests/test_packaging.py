"""Contents of the wheel. Building it needs no torch."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
# An import of torch during the build is an error, as on a machine without torch.
BLOCK_TORCH = "import sys; sys.modules['torch'] = None; exec(open('setup.py').read())"


@pytest.fixture(scope="module")
def source_files() -> list[str]:
    """Tracked files of the distribution."""
    command = [
        "git",
        "ls-files",
        "-z",
        "setup.py",
        "pyproject.toml",
        "megatron_rl",
        "sglang_bridge",
        "kernels",
    ]
    names = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, source_files: list[str]) -> set[str]:
    """Names in a wheel that was built from a copy of the tracked files."""
    copy = tmp_path_factory.mktemp("source")
    for name in source_files:
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-c", BLOCK_TORCH, "-q", "bdist_wheel", "--dist-dir", "dist"]
    subprocess.run(command, cwd=copy, check=True, capture_output=True, timeout=120)
    (file,) = (copy / "dist").glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        return set(archive.namelist())


def test_wheel_holds_every_module_and_nothing_else(
    wheel: set[str], source_files: list[str]
) -> None:
    top = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert top == {"megatron_rl", "sglang_bridge", "espo_kernels"}
    modules = {
        name.removeprefix("kernels/")
        for name in source_files
        if name.endswith(".py") and "/bench/" not in name
    }
    assert modules - {"setup.py"} - wheel == set()


def test_wheel_holds_the_shipped_checkpoints(wheel: set[str], source_files: list[str]) -> None:
    assets = {name for name in source_files if name.startswith("megatron_rl/models/assets/")}
    assert sum(name.endswith(".safetensors") for name in assets) >= 2
    assert assets - wheel == set()


def test_installed_packages_come_from_this_checkout(tmp_path: Path) -> None:
    """Also from another directory. The package `kernels` of SGLang is not hidden."""
    code = (
        "import espo_kernels, megatron_rl, sglang_bridge\n"
        "for package in (espo_kernels, megatron_rl, sglang_bridge): print(package.__file__)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert all(Path(line).is_relative_to(ROOT) for line in process.stdout.splitlines())
