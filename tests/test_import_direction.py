"""Imports point one way: launch -> megatron_rl -> {sglang_bridge, espo_kernels}, and one way among
the rooms.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "launch": ROOT / "launch",
    "megatron_rl": ROOT / "megatron_rl",
    "sglang_bridge": ROOT / "sglang_bridge",
    "espo_kernels": ROOT / "kernels" / "espo_kernels",
}
FORBIDDEN = {
    "launch": set(),
    "megatron_rl": {"launch", "tests"},
    "sglang_bridge": {
        "launch",
        "tests",
        "megatron_rl",
        "espo_kernels",
        "megatron",
        "hydra",
        "omegaconf",
    },
}
# The rooms of megatron_rl: each imports only those before it.
ROOMS = (
    "contracts",
    "models",
    "config",
    "records",
    "credit",
    "prompts",
    "environments",
    "rewards",
    "rollouts",
    "losses",
    "planning",
    "mcore",
    "training",
    "sync",
    "run",
)
# What the kernels may import besides the standard library: everything else would bind them to this
# trainer.
KERNELS_MAY_IMPORT = {"espo_kernels", "torch", "triton", "numpy", "numba", "llvmlite"}


def imports_of(source: str) -> Iterator[str]:
    """The top-level name of every absolute import, also inside functions and `if TYPE_CHECKING`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            yield node.module.partition(".")[0]


def room_imports(source: str) -> Iterator[str]:
    """The room of megatron_rl that each import leads to."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, (
                "a relative import hides where it leads"
            )
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("megatron_rl."))


def imports_by_file(package: str) -> list[tuple[str, str]]:
    files = sorted(PACKAGES[package].rglob("*.py"))
    return [
        (str(file.relative_to(ROOT)), name)
        for file in files
        for name in imports_of(file.read_text())
    ]


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_no_import_points_back(package: str) -> None:
    found = imports_by_file(package)
    assert found, f"{package} has no imports: is the path right?"
    assert [(file, name) for file, name in found if name in FORBIDDEN[package]] == []


def test_rooms_import_only_rooms_before_them() -> None:
    package = PACKAGES["megatron_rl"]
    assert {path.name for path in package.iterdir() if path.is_dir()} - {"__pycache__"} == set(
        ROOMS
    )
    backward = [
        f"{file.relative_to(package)} imports {target}"
        for room in ROOMS
        for file in sorted((package / room).rglob("*.py"))
        for target in room_imports(file.read_text())
        if ROOMS.index(target) > ROOMS.index(room)
    ]
    assert backward == []
    assert list(
        room_imports("from megatron_rl.run.rank import Rank\nimport megatron_rl.engines as s\n")
    ) == [
        "run",
        "sync",
    ]


def test_megatron_is_imported_behind_mcore_alone() -> None:
    found = {file for file, name in imports_by_file("megatron_rl") if name == "megatron"}
    assert found, "nothing imports megatron.core: is the path right?"
    assert {file for file in found if "/mcore/" not in file} == set()


def test_kernels_stand_alone() -> None:
    allowed = KERNELS_MAY_IMPORT | set(sys.stdlib_module_names)
    found = imports_by_file("espo_kernels")
    assert found, "espo_kernels has no imports: is the path right?"
    assert [(file, name) for file, name in found if name not in allowed] == []


def test_a_backward_import_would_be_found() -> None:
    source = "def f():\n    from megatron_rl.config import schema\n    import torch.nn as nn\n    from . import x\n"
    assert list(imports_of(source)) == ["megatron_rl", "torch"]
