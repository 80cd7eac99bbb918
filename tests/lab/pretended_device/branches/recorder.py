"""Records which places that only a GPU executes were executed in this process.

Modules are compiled with a call at each of these places.
"""

from __future__ import annotations

import ast
import atexit
import importlib.machinery
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.lab.pretended_device.branches.finder import Place, SourceFile, find_places

_CALL = "__record_gpu_place__"


class BranchRecorder(MetaPathFinder):
    """Finds the modules with such places before Python does.

    root: the folder of the packages. executed_places: those that were executed.
    """

    def __init__(self, root: Path) -> None:
        self.executed_places: set[Place] = set()
        self._files = {str(root / name): file for name, file in find_places(root).items()}
        self._places: list[Place] = []

    def install(self, directory: Path) -> None:
        """Record from now on, and write `directory`/PID.json when the process ends.

        Raises RuntimeError if a module with such places was imported already.
        """
        late = [m for m in sys.modules.values() if getattr(m, "__file__", None) in self._files]
        if late:
            names = ", ".join(module.__name__ for module in late)
            raise RuntimeError(f"imported before its places could be recorded: {names}")
        sys.meta_path.insert(0, self)
        atexit.register(self.write, directory)

    def write(self, directory: Path) -> None:
        """Write the executed places as texts."""
        directory.mkdir(parents=True, exist_ok=True)
        texts = sorted(map(str, self.executed_places))
        (directory / f"{os.getpid()}.json").write_text(json.dumps(texts, indent=1))

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module with such places; None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.origin not in self._files:
            return None
        spec.loader = _Loader(name, spec.origin, self)
        return spec

    def compile(self, file: str) -> CodeType:
        """The code of a file, with a call at each place."""
        tree = _Instrument(self._files[file], self._places).visit(self._files[file].tree)
        return compile(ast.fix_missing_locations(tree), file, "exec", dont_inherit=True)

    def record(self, index: int, value: Any = None) -> Any:
        """Note that a place was executed, and return the value."""
        place = self._places[index]
        if place.kind != "condition" or bool(value) == place.value:
            self.executed_places.add(place)
        return value


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a file as the recorder compiles it."""

    def __init__(self, name: str, path: str, recorder: BranchRecorder) -> None:
        super().__init__(name, path)
        self._recorder = recorder

    def get_code(self, fullname: str) -> CodeType:
        return self._recorder.compile(self.path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_CALL] = self._recorder.record
        super().exec_module(module)


class _Instrument(ast.NodeTransformer):
    """Puts a call at each place of a file. places: gets the places; calls have their indices."""

    def __init__(self, source: SourceFile, places: list[Place]) -> None:
        self._by_node = source.places
        self._places = places

    def visit(self, node: ast.AST) -> Any:
        """Replace a node. Identities are looked up before the nodes below are replaced."""
        place = self._by_node.get(id(node))
        new_node = super().visit(node)
        if place is None:
            return new_node
        self._places.append(place)
        arguments: list[ast.expr] = [ast.Constant(len(self._places) - 1)]
        if place.kind in ("function", "case"):
            call = ast.Call(ast.Name(_CALL, ast.Load()), arguments, [])
            # Behind a docstring, which would be none in second place
            first = int(place.kind == "function" and ast.get_docstring(new_node) is not None)
            new_node.body.insert(first, ast.copy_location(ast.Expr(call), new_node.body[0]))
            return new_node
        call = ast.Call(ast.Name(_CALL, ast.Load()), [*arguments, new_node], [])
        return ast.copy_location(call, node)


def record_branches(root: Path, directory: Path) -> None:
    """Record the executed places of this process in a file of `directory`."""
    BranchRecorder(root).install(directory)
