"""Imports point one way, without cycles.

launch -> megatron_rl -> {sglang_bridge, espo_kernels}, and one way among the rooms of megatron_rl.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.support.style import walk

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "launch": ROOT / "launch",
    "megatron_rl": ROOT / "megatron_rl",
    "sglang_bridge": ROOT / "sglang_bridge",
    "espo_kernels": ROOT / "kernels" / "espo_kernels",
}
# Packages that each package must not import
FORBIDDEN = {
    "launch": {"tests"},
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
    "engines",
    "run",
)
# Modules of run/ that open a run, which its wings must not import.
_OPENING = frozenset({"main", "open_run", "open_loop"})
WING_FORBIDDEN = {
    "checkpoints": _OPENING | {"features", "loop", "modes"},
    "supervision": _OPENING | {"features", "loop", "modes"},
    "loop": _OPENING | {"modes"},
    "features": _OPENING | {"modes"},
    "modes": _OPENING,
}
# The kernels may import these besides the standard library. More would bind them to this trainer.
KERNELS_MAY_IMPORT = {"espo_kernels", "torch", "triton", "numpy", "numba", "llvmlite"}

# Imports and calls that unpickle data of a file or of another process
UNPICKLING = re.compile(
    r"import (pickle|shelve|dill|cloudpickle|joblib|marshal)|_object(_list)?\(|torch\.load\(|"
    r"allow_pickle=True|from pickle import (?!dumps\n)"
)

Graph = Mapping[str, set[str]]


@cache
def all_imports(source: str) -> tuple[str, ...]:
    """The dotted name of every import. Those of relative ones begin with points."""
    names: list[str] = []
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            names += [f"{package}.{alias.name}" for alias in node.names]
    return tuple(names)


def imports_of(source: str) -> Iterator[str]:
    """Yield the dotted name of every absolute import, such as `a.b.c` for `from a.b import c`.

    Imports inside functions and `if TYPE_CHECKING` are included.
    """
    yield from (name for name in all_imports(source) if not name.startswith("."))


def has_relative_import(source: str) -> bool:
    return any(name.startswith(".") for name in all_imports(source))


@cache
def read_modules(package: str) -> dict[str, str]:
    """The source of every module of a package, by its dotted name."""
    folder = PACKAGES[package]
    modules = {}
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder.parent).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        modules[".".join(parts)] = file.read_text()
    return modules


def packages_imported_by(package: str) -> list[tuple[str, str]]:
    """(module, imported top-level package) of every import in a package."""
    pairs = [
        (module, name.partition(".")[0])
        for module, source in read_modules(package).items()
        for name in imports_of(source)
    ]
    assert pairs, f"{package} has no imports: is the path correct?"
    return pairs


@pytest.mark.parametrize("package", sorted(FORBIDDEN))
def test_no_package_imports_one_above_it(package: str) -> None:
    imports = packages_imported_by(package)
    assert [pair for pair in imports if pair[1] in FORBIDDEN[package]] == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_imports_are_absolute(package: str) -> None:
    """Relative imports would hide their target from these tests."""
    modules = read_modules(package)
    assert [name for name, source in modules.items() if has_relative_import(source)] == []


def backward_imports(modules: Mapping[str, str], rooms: Sequence[str]) -> list[str]:
    """Imports of megatron_rl that lead to a room above the importing module's room."""
    backward = []
    for module, source in modules.items():
        _, _, inner = module.partition(".")
        if not inner:
            continue
        room = inner.partition(".")[0]
        for name in imports_of(source):
            package, *parts = name.split(".")
            is_backward = package == "megatron_rl" and rooms.index(parts[0]) > rooms.index(room)
            if is_backward:
                backward.append(f"{module} imports {name}")
    return backward


def test_rooms_import_only_rooms_before_them() -> None:
    package = PACKAGES["megatron_rl"]
    folders = {path.name for path in package.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(ROOMS)
    assert backward_imports(read_modules("megatron_rl"), ROOMS) == []


def wing_violations(modules: Mapping[str, str]) -> list[str]:
    """Imports of a wing of run/ that lead to a module which it must not import."""
    violations = []
    for module, source in modules.items():
        parts = module.split(".")
        forbidden = WING_FORBIDDEN.get(parts[2], frozenset()) if len(parts) > 3 else frozenset()
        for name in imports_of(source):
            target = name.split(".")
            if target[:2] == ["megatron_rl", "run"] and target[2] in forbidden:
                violations.append(f"{module} imports {name}")
    return violations


def test_wings_of_run_do_not_import_what_opens_them() -> None:
    modules = read_modules("megatron_rl")
    names = {name for names in WING_FORBIDDEN.values() for name in names}
    assert [name for name in names if f"megatron_rl.run.{name}" not in modules] == []
    run = {name: source for name, source in modules.items() if name.startswith("megatron_rl.run.")}
    assert wing_violations(run) == []


def test_megatron_is_imported_behind_mcore_alone() -> None:
    importers = {
        module for module, name in packages_imported_by("megatron_rl") if name == "megatron"
    }
    assert importers, "nothing imports megatron.core: is the path correct?"
    assert {name for name in importers if not name.startswith("megatron_rl.mcore.")} == set()


def test_kernels_stand_alone() -> None:
    allowed_names = KERNELS_MAY_IMPORT | set(sys.stdlib_module_names)
    imports = packages_imported_by("espo_kernels")
    assert [pair for pair in imports if pair[1] not in allowed_names] == []


def import_graph(modules: Mapping[str, str]) -> dict[str, set[str]]:
    """The modules that each module imports, late and type-only imports included."""
    graph: dict[str, set[str]] = {}
    for module, source in modules.items():
        graph[module] = set()
        for name in imports_of(source):
            # `from a.b import c` imports the module a.b.c, or a name of the module a.b.
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != module:
                graph[module].add(target)
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    """All modules that a module imports, also through others."""
    members: set[str] = set()
    stack = [start]
    while stack:
        new = graph[stack.pop()] - members
        members |= new
        stack += new
    return members


def cycles(graph: Graph) -> list[list[str]]:
    """Groups of modules that import each other, also through others."""
    targets = {module: reachable(graph, module) for module in graph}
    groups = {
        tuple(sorted(other for other in targets[module] if module in targets[other]))
        for module in graph
    }
    return sorted(list(group) for group in groups if group)


def test_no_modules_import_each_other() -> None:
    modules = {
        name: source
        for package in ("launch", "megatron_rl", "sglang_bridge")
        for name, source in read_modules(package).items()
    }
    assert len(modules) > 300
    assert cycles(import_graph(modules)) == []


def test_one_module_unpickles_and_it_looks_up_listed_classes() -> None:
    """Everything else is decoded by type: JSON, MessagePack and tensors."""
    modules = {
        name: source
        for package in ("megatron_rl", "sglang_bridge", "espo_kernels")
        for name, source in read_modules(package).items()
    }
    unpickling = {name for name, source in modules.items() if UNPICKLING.search(source)}
    assert unpickling == {"megatron_rl.mcore.checkpoint.storage"}
    pickling = {name for name, source in modules.items() if "from pickle import" in source}
    assert pickling == {"sglang_bridge.weights.ipc.handover"}, "it sends what others unpickle"


def test_late_and_type_only_imports_are_seen() -> None:
    source = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from megatron_rl.config import schema
def f():
    import torch.nn as nn
"""
    names = ["typing.TYPE_CHECKING", "megatron_rl.config.schema", "torch.nn"]
    assert list(imports_of(source)) == names
    assert has_relative_import("from . import x") and not has_relative_import(source)


def test_backward_imports_are_found() -> None:
    modules = {
        "megatron_rl": "",
        "megatron_rl.config.schema": "from megatron_rl.run.main import run",
        "megatron_rl.run.main": "import megatron_rl.config.schema",
    }
    violation = "megatron_rl.config.schema imports megatron_rl.run.main.run"
    assert backward_imports(modules, ROOMS) == [violation]


def test_imports_of_what_opens_a_wing_are_found() -> None:
    source = (
        "from megatron_rl.run.loop.leader import Leader\nfrom megatron_rl.run.main import run\n"
    )
    modules = {f"megatron_rl.run.{wing}.a": source for wing in ("checkpoints", "modes")}
    assert wing_violations(modules) == [
        "megatron_rl.run.checkpoints.a imports megatron_rl.run.loop.leader.Leader",
        "megatron_rl.run.checkpoints.a imports megatron_rl.run.main.run",
        "megatron_rl.run.modes.a imports megatron_rl.run.main.run",
    ]
    assert wing_violations({"megatron_rl.run.open_loop": source}) == []


def test_import_cycles_are_found() -> None:
    modules = {
        "a": "from b import c",
        "b": "",
        "b.c": "def f():\n    from d import g",
        "d": "if TYPE_CHECKING:\n    import a",
        "e": "import a",
    }
    assert cycles(import_graph(modules)) == [["a", "b.c", "d"]]
    assert cycles(import_graph(modules | {"d": ""})) == []
