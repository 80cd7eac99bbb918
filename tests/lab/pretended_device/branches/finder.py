"""Finds every place in source files that only a GPU executes.

There are four kinds of places:

- a condition about the device, such as `tensor.is_cuda`. On a GPU it has one of its two values
- an expression that names a GPU, such as `torch.cuda.set_device` or "nccl"
- a case of a `match` with such a name
- a function that is called in no other places than these
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tests.lab.pretended_device.branches.device_conditions import (
    is_gpu_attribute,
    is_gpu_constant,
    is_gpu_test,
    is_torch_cuda,
    value_on_gpu,
)

PACKAGES = ("megatron_rl", "sglang_bridge", "kernels/espo_kernels")
# They stand for CUDA where there is none.
CPU_FOLDERS = ("megatron_rl/mcore/cpu/", "sglang_bridge/cpu_shim/")

Kind = Literal["condition", "expression", "case", "function"]
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Scope = _Function | ast.ClassDef
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, order=True)
class Place:
    """A place in a file. It has no line number, which changes with every edit.

    text: the source of the condition or expression. value: of a condition on a GPU.
    """

    file: str
    function: str
    kind: Kind
    text: str = ""
    value: bool = True

    def __str__(self) -> str:
        start = f"{self.file} {self.function}"
        if self.kind == "condition":
            return f"{start}: {self.text} is {self.value}"
        return f"{start}: {self.text}" if self.text else start


@dataclass
class SourceFile:
    """A file with its places. places: by the identity of the node in `tree`."""

    name: str
    tree: ast.Module
    places: dict[int, Place] = field(default_factory=dict)


def find_places(root: Path, packages: Sequence[str] = PACKAGES) -> dict[str, SourceFile]:
    """The files of the packages that have such places, by their path from `root`."""
    texts = {}
    for package in packages:
        for path in sorted((root / package).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(CPU_FOLDERS):
                texts[name] = path.read_text()
    return find_in_texts(texts)


def find_in_texts(texts: Mapping[str, str]) -> dict[str, SourceFile]:
    """The files that have such places. texts: source by name."""
    walks = [_Walk(SourceFile(name, ast.parse(text))) for name, text in texts.items()]
    for walk in walks:
        walk.block(walk.source.tree.body, on_gpu=False)
    _add_functions(walks)
    return {walk.source.name: walk.source for walk in walks if walk.source.places}


@dataclass(frozen=True)
class _Reference:
    """A use of a name. module: the module before its dot. inside: the scopes around it."""

    name: str
    module: str
    inside: tuple[_Scope, ...]
    on_gpu: bool


@dataclass(frozen=True)
class _Definition:
    """A function or class. name: with the classes and functions around it."""

    file: str
    name: str
    scope: _Scope


class _Walk:
    """Walks through a file: notes conditions, expressions, and the names that are used."""

    def __init__(self, source: SourceFile) -> None:
        self.source = source
        self.definitions: dict[_Scope, str] = {}  # with the qualified name
        self.references: list[_Reference] = []
        self._scopes: tuple[_Scope, ...] = ()
        self._variables: dict[str, bool] = {}

    def block(self, statements: Sequence[ast.stmt], *, on_gpu: bool) -> None:
        """Walk through statements. on_gpu: True if only a GPU gets there."""
        for statement in statements:
            if isinstance(statement, ast.If):
                on_gpu |= self._if(statement, on_gpu)
            elif isinstance(statement, _Scope):
                self._scope(statement, on_gpu)
            elif isinstance(statement, ast.Match):
                self._match(statement, on_gpu)
            else:
                self._learn(statement)
                self._children(statement, on_gpu)

    def _if(self, node: ast.If, on_gpu: bool) -> bool:
        """Returns True if only a GPU gets to what follows."""
        value = self._condition(node.test, on_gpu)
        self.block(node.body, on_gpu=on_gpu or value is True)
        self.block(node.orelse, on_gpu=on_gpu or value is False)
        return value is False and isinstance(node.body[-1], _ENDS)

    def _match(self, node: ast.Match, on_gpu: bool) -> None:
        self._visit(node.subject, on_gpu)
        for case in node.cases:
            pattern = case.pattern
            names_gpu = isinstance(pattern, ast.MatchValue) and is_gpu_constant(pattern.value)
            if names_gpu:
                self._note(case, "case", text=ast.unparse(pattern))
            self.block(case.body, on_gpu=on_gpu or names_gpu)

    def _condition(self, test: ast.expr, on_gpu: bool) -> bool | None:
        value = value_on_gpu(test, self._variables)
        if value is None or not self._scopes:
            self._visit(test, on_gpu)
            return None
        self._note(test, "condition", value=value)
        for node in ast.walk(test):
            self._refer(node, on_gpu)
        return value

    def _scope(self, node: _Scope, on_gpu: bool) -> None:
        outer_scopes = self._scopes
        outer_variables = self._variables
        for decorator in node.decorator_list:
            self._visit(decorator, on_gpu)
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            self._visit(base, on_gpu)
        self._scopes = (*outer_scopes, node)
        self._variables = dict(outer_variables)
        self.definitions[node] = ".".join(scope.name for scope in self._scopes)
        self.block(node.body, on_gpu=on_gpu)
        self._scopes = outer_scopes
        self._variables = outer_variables

    def _learn(self, node: ast.stmt) -> None:
        """Note what an assignment says of the device."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = value_on_gpu(node.value, self._variables)
            if value is not None:
                self._variables[node.targets[0].id] = value

    def _children(self, node: ast.AST, on_gpu: bool) -> None:
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns"):
                continue
            items = value if isinstance(value, list) else [value]
            if items and all(isinstance(item, ast.stmt) for item in items):
                self.block(items, on_gpu=on_gpu)
                continue
            for item in items:
                if isinstance(item, ast.AST):
                    self._visit(item, on_gpu)

    def _visit(self, node: ast.AST, on_gpu: bool) -> None:
        if isinstance(node, ast.IfExp):
            value = self._condition(node.test, on_gpu)
            self._visit(node.body, on_gpu or value is True)
            self._visit(node.orelse, on_gpu or value is False)
            return
        if isinstance(node, ast.comprehension):
            self._visit(node.iter, on_gpu)
            for condition in node.ifs:
                self._condition(condition, on_gpu)
            return
        if is_gpu_test(node) and value_on_gpu(node, self._variables) is not None:
            self._condition(node, on_gpu)
            return
        self._refer(node, on_gpu)
        if self._names_gpu(node):
            self._note(node, "expression")
        if isinstance(node, ast.JoinedStr | ast.Compare):
            for part in _parts(node):
                self._visit(part, on_gpu)
        elif not is_gpu_attribute(node):
            self._children(node, on_gpu)

    def _names_gpu(self, node: ast.AST) -> bool:
        if not self._scopes or isinstance(self._scopes[-1], ast.ClassDef):
            return False
        if is_gpu_constant(node):
            return True
        return is_gpu_attribute(node) and not is_torch_cuda(node)

    def _refer(self, node: ast.AST, on_gpu: bool) -> None:
        if isinstance(node, ast.Name):
            self.references.append(_Reference(node.id, "", self._scopes, on_gpu))
        elif isinstance(node, ast.Attribute):
            module = node.value.id if isinstance(node.value, ast.Name) else "?"
            self.references.append(_Reference(node.attr, module, self._scopes, on_gpu))

    def _note(self, node: ast.AST, kind: Kind, *, text: str = "", value: bool = True) -> None:
        function = ".".join(scope.name for scope in self._scopes)
        self.source.places[id(node)] = Place(
            self.source.name, function, kind, text or ast.unparse(node), value
        )


def _parts(node: ast.JoinedStr | ast.Compare) -> list[ast.expr]:
    """The parts of a text or of a comparison, without constants."""
    if isinstance(node, ast.JoinedStr):
        return [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
    sides = (node.left, *node.comparators)
    return [side for side in sides if not isinstance(side, ast.Constant | ast.Tuple)]


def _add_functions(walks: Sequence[_Walk]) -> None:
    """Add the functions that are used, and only in places that a GPU alone gets to."""
    uses = _uses(walks)
    gpu_scopes: set[_Scope] = set()
    while new := set(_more(uses, gpu_scopes)):
        gpu_scopes |= new
    for walk in walks:
        for scope in gpu_scopes.intersection(walk.definitions):
            for inner in ast.walk(scope):
                if isinstance(inner, _Function) and inner in walk.definitions:
                    place = Place(walk.source.name, walk.definitions[inner], "function")
                    walk.source.places[id(inner)] = place


def _uses(walks: Sequence[_Walk]) -> dict[_Scope, list[_Reference]]:
    """The uses of each function and class outside of it."""
    by_name: dict[str, list[_Definition]] = defaultdict(list)
    for walk in walks:
        for scope, name in walk.definitions.items():
            by_name[scope.name].append(_Definition(walk.source.name, name, scope))
    uses: dict[_Scope, list[_Reference]] = defaultdict(list)
    for walk in walks:
        for reference in walk.references:
            for scope in _meanings(reference, walk.source.name, by_name[reference.name]):
                if scope not in reference.inside:
                    uses[scope].append(reference)
    return uses


def _meanings(reference: _Reference, file: str, definitions: Sequence[_Definition]) -> list[_Scope]:
    """The definitions that a name may mean.

    Those of its own file, if there are any, or of the module before the dot. Behind another dot, a
    name may mean every method of that name.
    """
    if not reference.module:
        own = [one.scope for one in definitions if one.file == file]
        return own or [one.scope for one in definitions]
    module_scopes = [
        one.scope for one in definitions if one.file.endswith(f"/{reference.module}.py")
    ]
    return module_scopes or [one.scope for one in definitions if "." in one.name]


def _more(uses: Mapping[_Scope, Sequence[_Reference]], gpu_scopes: set[_Scope]) -> Iterator[_Scope]:
    for scope, references in uses.items():
        if scope not in gpu_scopes and all(
            use.on_gpu or not gpu_scopes.isdisjoint(use.inside) for use in references
        ):
            yield scope
