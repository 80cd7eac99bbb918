"""Which configuration keys a program reads: attributes of values that are annotated with a
section's class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import fields

from megatron_rl.config.algorithms import ALGORITHMS
from megatron_rl.config.keys import INNER_SECTIONS, SECTIONS, declared_keys
from megatron_rl.config.schema import Configuration
from sglang_bridge.settings import ServerSettings

# The configuration itself, and the place that only hands it on: reading there is not using.
NOT_A_USE = ("megatron_rl/config/", "megatron_rl/run/build.py")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def unread_keys(sources: Mapping[str, str]) -> list[str]:
    """The declared keys that no source reads outside `NOT_A_USE`.

    sources: from a file's name to its text.
    """
    modules = [ast.parse(text) for name, text in sources.items() if not name.startswith(NOT_A_USE)]
    nodes = [node for module in modules for node in ast.walk(module)]
    own = {node.name for node in nodes if isinstance(node, ast.ClassDef)}
    reader = _Reader(own)
    for _ in range(3):  # what a class holds may be known only once another class is
        for module in modules:
            reader.read(module)
    sections = {key.partition(".")[0] for key in declared_keys() if "." in key} | set(
        INNER_SECTIONS
    )
    return [key for key in declared_keys() if key not in reader.found and key not in sections]


class _Reader:
    """Follows annotated names, attributes of `self` and plain assignments through modules, by the
    classes' names.
    """

    def __init__(self, own: set[str]) -> None:
        self._own = own
        sections = {cls.__name__: name for name, cls in SECTIONS.items()}
        sections |= {cls.__name__: name for name, cls in INNER_SECTIONS.items()}
        sections |= {cls.__name__: "algo" for cls in ALGORITHMS.values()} | {
            ServerSettings.__name__: "engine"
        }
        self._sections = sections
        # What attributes of a class hold: the name of the attribute to the name of its class.
        self._held = {name: dict[str, str]() for name in sections}
        self._held["Configuration"] = {name: cls.__name__ for name, cls in SECTIONS.items()}
        self._loaded = set[str]()  # attributes that are read of anything but a section
        self._top = {field.name for field in fields(Configuration)} - set(SECTIONS)
        self.found: set[str] = set()

    def read(self, module: ast.Module) -> None:
        for node in ast.walk(module):
            if isinstance(node, ast.ClassDef):
                held = self._held.setdefault(node.name, {})
                for statement in node.body:
                    if isinstance(statement, ast.AnnAssign) and isinstance(
                        statement.target, ast.Name
                    ):
                        self._note(held, statement.target.id, self._annotated(statement.annotation))
                    elif isinstance(statement, Function):
                        self._read_function(statement, {"self": node.name, "cls": node.name})
        for statement in module.body:
            if isinstance(statement, Function):
                self._read_function(statement, {})

    def _read_function(self, function: Function, outer: Mapping[str, str]) -> None:
        known, arguments = dict(outer), function.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None:
                self._note(known, argument.arg, self._annotated(argument.annotation))
        for node in ast.walk(function):
            if isinstance(node, Function) and node is not function:
                self._read_function(node, known)
            for target, value in _assignments(node):
                self._assign(target, self._type(value, known), known)
            if isinstance(node, ast.AnnAssign):
                self._assign(node.target, self._annotated(node.annotation), known)
        copies = {
            id(value)
            for node in ast.walk(function)
            for name, value in _copies(node, self._own)
            if name not in self._loaded and f"_{name}" not in self._loaded
        }
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Load)
                and id(node) not in copies
            ):
                self._count(self._type(node.value, known), node.attr)

    def _assign(self, target: ast.expr, found: str | None, known: dict[str, str]) -> None:
        if isinstance(target, ast.Name):
            self._note(known, target.id, found)
        elif (
            isinstance(target, ast.Attribute)
            and (owner := self._type(target.value, known)) is not None
        ):
            self._note(self._held.setdefault(owner, {}), target.attr, found)

    def _count(self, owner: str | None, attribute: str) -> None:
        if owner in self._sections:
            self.found.add(f"{self._sections[owner]}.{attribute}")
        elif owner == "Configuration" and attribute in self._top:
            self.found.add(attribute)
        else:
            self._loaded.add(attribute)

    def _type(self, value: ast.expr, known: Mapping[str, str]) -> str | None:
        """The class of an expression, where following names and attributes tells it."""
        if isinstance(value, ast.Name):
            return known.get(value.id)
        if (
            isinstance(value, ast.Attribute)
            and (owner := self._type(value.value, known)) is not None
        ):
            return self._held.get(owner, {}).get(value.attr)
        return None

    def _annotated(self, annotation: ast.expr) -> str | None:
        """The first class of an annotation that is known to hold something."""
        names = [
            n.id if isinstance(n, ast.Name) else n.attr
            for n in ast.walk(annotation)
            if isinstance(n, _NAMED)
        ]
        return next((name for name in names if name in self._held), None)

    @staticmethod
    def _note(where: dict[str, str], name: str, found: str | None) -> None:
        if found is not None:
            where[name] = found


_NAMED = ast.Name | ast.Attribute


def _copies(node: ast.AST, own: set[str]) -> Iterator[tuple[str, ast.expr]]:
    """Values that are only handed on, with the name they get: stored, passed to a class of ours, or
    not used.
    """
    if isinstance(node, ast.Expr):
        yield "", node.value
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in own:
        yield from ((keyword.arg or "", keyword.value) for keyword in node.keywords)
    for target, value in _assignments(node):
        if isinstance(target, ast.Attribute):
            yield target.attr.lstrip("_"), value


def _assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Pairs of target and value, those of `a, b = x, y` one by one."""
    if isinstance(node, ast.NamedExpr):
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                yield from zip(target.elts, node.value.elts, strict=False)
            else:
                yield target, node.value
