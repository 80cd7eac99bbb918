"""Measures of relations in the code, which tests/test_shape.py enforces.

They count what a change has to touch: who writes which state, what a constructor needs, which names
exist for one use. `python -m tests.support.shape` prints them with the largest offenders.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from tests.support.style import Function, Source, functions_of, parse_all, walk

ROOT = Path(__file__).resolve().parents[2]
SOURCE_FOLDERS = ("launch", "megatron_rl", "sglang_bridge", "kernels/espo_kernels")
COMMANDS = (
    "train_rl",
    "preflight",
    "rehearsal",
    "checkpoint",
    "report",
    "profile_prompts",
    "slurm",
)
MIN_METHODS = 4  # a class with fewer of them is data
_CONSTRUCTORS = ("__init__", "__post_init__")
_MUTATORS = (
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "setdefault",
    "subtract",
    "update",
)


@dataclass(frozen=True)
class Class:
    """A class of the source. path: of its file, from the root."""

    path: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        """The name, which is unique enough in this code."""
        return self.node.name

    @property
    def bases(self) -> list[str]:
        """The names of the base classes, without their modules."""
        return [_last_name(base) for base in self.node.bases]

    @property
    def methods(self) -> list[Function]:
        """The methods and properties."""
        return [node for node in self.node.body if isinstance(node, Function)]

    @property
    def is_protocol(self) -> bool:
        """True for a `Protocol` of typing, which is none of asyncio."""
        return any(ast.unparse(base) == "Protocol" for base in self.node.bases)


def read_sources(folders: Iterable[str]) -> dict[str, Source]:
    """Return every Python file, by its path from the root."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return parse_all({str(path.relative_to(ROOT)): path.read_text() for path in paths})


def classes_of(sources: Mapping[str, Source]) -> list[Class]:
    """Return all classes, nested ones included."""
    return [
        Class(path, node) for path, source in sources.items() for node in source.of(ast.ClassDef)
    ]


def write_pairs(item: Class) -> set[tuple[str, str]]:
    """Return the pairs of a method and an attribute that it changes, without constructors.

    An attribute is written as from `self`: `x`, or `x.y` for the state of a part. Assignments,
    deletions and calls such as `append` change it.
    """
    pairs = set()
    for method in item.methods:
        if method.name in _CONSTRUCTORS:
            continue
        pairs |= {(method.name, attribute) for attribute in _changed_attributes(method)}
    return pairs


def _changed_attributes(method: Function) -> Iterator[str]:
    for node in walk(method):
        target: ast.expr | None = None
        if isinstance(node, ast.Attribute | ast.Subscript):
            is_change = isinstance(node.ctx, ast.Store | ast.Del)
            target = node if is_change else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            target = node.func.value if node.func.attr in _MUTATORS else None
        name = None if target is None else _attribute_of_self(target)
        if name:
            yield name


def _attribute_of_self(node: ast.expr) -> str:
    """Return `x.y` for `self.x.y` and `self.x.y[...]`, an empty string for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
        node = node.value
    is_self = isinstance(node, ast.Name) and node.id == "self"
    return ".".join(reversed(names)) if is_self else ""


def constructor_parameters(item: Class) -> list[str]:
    """Return the parameters of the constructor, or the fields of a dataclass that are such."""
    for method in item.methods:
        if method.name == "__init__":
            arguments = method.args
            names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            return [argument.arg for argument in names if argument.arg != "self"]
    if not any("dataclass" in ast.unparse(decorator) for decorator in item.node.decorator_list):
        return []
    return [
        field.target.id
        for field in item.node.body
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and "ClassVar" not in ast.unparse(field.annotation)
        and "init=False" not in (ast.unparse(field.value) if field.value else "")
    ]


def lonely_protocols(classes: Iterable[Class]) -> list[str]:
    """Return the protocols that at most one class of the source implements.

    A class implements a protocol if it or its bases have all of the protocol's names.
    """
    by_name: dict[str, Class] = {item.name: item for item in classes}
    all_names = {name: _all_names(item, by_name) for name, item in by_name.items()}
    lonely = []
    for protocol in by_name.values():
        if not protocol.is_protocol:
            continue
        names = _names_of(protocol)
        users = [
            item
            for item in by_name.values()
            if not item.is_protocol and names <= all_names[item.name]
        ]
        if len(users) <= 1 and not _is_callable(names):
            lonely.append(protocol.name)
    return lonely


def _is_callable(names: set[str]) -> bool:
    """Return True for a protocol that functions and lambdas implement."""
    return names == {"__call__"}


def _names_of(item: Class) -> set[str]:
    names = {method.name for method in item.methods if not method.name.startswith("__init")}
    for node in item.node.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    for method in item.methods:
        names |= {
            node.attr
            for node in walk(method)
            if isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
    return names


def _all_names(item: Class, by_name: Mapping[str, Class]) -> set[str]:
    names = _names_of(item)
    for base in item.bases:
        if base in by_name and base != item.name:
            names |= _all_names(by_name[base], by_name)
    return names


def uncaught_exceptions(classes: Iterable[Class], sources: Iterable[Source]) -> list[str]:
    """Return the exceptions that no handler, `suppress`, `isinstance` or tuple names."""
    parents = {item.name: item.bases for item in classes}
    exceptions = {name for name in parents if _is_exception(name, parents)}
    names = {name for source in sources for name in _handled_names(source)}
    return sorted(exceptions - names)


def _is_exception(name: str, parents: Mapping[str, list[str]]) -> bool:
    if name in parents:
        return any(_is_exception(base, parents) for base in parents[name] if base != name)
    return name in ("BaseException", "Exception") or name.endswith(("Error", "Failure"))


def _handled_names(source: Source) -> Iterator[str]:
    expressions = [handler.type for handler in source.of(ast.ExceptHandler) if handler.type]
    for call in source.of(ast.Call):
        if _last_name(call.func) in ("suppress", "isinstance"):
            expressions += call.args
    for assignment in source.of(ast.Assign):
        if isinstance(assignment.value, ast.Tuple):
            expressions.append(assignment.value)
    for expression in expressions:
        yield from (_last_name(part) for part in walk(expression))


def tests_of_private_names(sources: Mapping[str, Source]) -> list[str]:
    """Return the test functions that use a private name of another object or module."""
    return [
        f"{path}::{function.name}"
        for path, source in sources.items()
        for function in functions_of(source)
        if function.name.startswith("test_") and any(map(_is_private_use, walk(function)))
    ]


def _is_private_use(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return _is_private(node.attr) and not is_own
    if isinstance(node, ast.Call) and _last_name(node.func) in ("setattr", "getattr", "delattr"):
        texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
        return any(isinstance(text, str) and _is_private(text.split(".")[-1]) for text in texts)
    return False


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def entries_without_command() -> list[str]:
    """Return what lies in launch/ and is no command of a user."""
    names = {path.stem for path in (ROOT / "launch").iterdir()}
    return sorted(name for name in names.difference(COMMANDS) if not name.startswith("__"))


def message_kinds() -> list[str]:
    """Return the messages between rank 0 and the collectors."""
    from megatron_rl.rollouts.wire import messages

    kinds = (*get_args(messages.ToCollector), *get_args(messages.FromCollector))
    return [kind.__name__ for kind in kinds]


def settings_keys() -> list[str]:
    """Return the keys of the configuration, such as `train.total_steps`."""
    from megatron_rl.config.cli import compose
    from megatron_rl.records.past_run import flat_settings
    from megatron_rl.records.run_directory import to_yaml

    return sorted(flat_settings(to_yaml(compose(["experiment=smoke"]))))


@dataclass(frozen=True)
class Measure:
    """A number that should not grow. offenders: what it counts, or the largest first."""

    value: int
    offenders: list[str]


def measure(
    sources: Mapping[str, Source], test_sources: Mapping[str, Source]
) -> dict[str, Measure]:
    """Return all measures by their names."""
    classes = classes_of(sources)
    behaviour = [item for item in classes if len(item.methods) >= MIN_METHODS]
    private_parameters = [
        f"{item.name}.{name}"
        for item in classes
        for name in constructor_parameters(item)
        if name.startswith("_")
    ]
    return {
        "write pairs": _largest({item.name: len(write_pairs(item)) for item in classes}),
        "constructor parameters": _largest(
            {item.name: len(constructor_parameters(item)) for item in behaviour}
        ),
        "private constructor parameters": _number(private_parameters),
        "protocols with one implementation": _number(lonely_protocols(classes)),
        "exceptions that nobody catches": _number(uncaught_exceptions(classes, sources.values())),
        "message kinds": _number(message_kinds()),
        "keys": _number(settings_keys()),
        "tests of private names": _number(tests_of_private_names(test_sources)),
        "entries of launch/ without a command": _number(entries_without_command()),
    }


def _largest(sizes: Mapping[str, int]) -> Measure:
    by_size = sorted(sizes.items(), key=lambda item: -item[1])
    return Measure(by_size[0][1], [f"{name} {size}" for name, size in by_size])


def _number(offenders: list[str]) -> Measure:
    return Measure(len(offenders), offenders)


def main() -> int:
    """Print the value of each measure, and the first offenders."""
    measures = measure(read_sources(SOURCE_FOLDERS), read_sources(["tests"]))
    for name, result in measures.items():
        print(f"{name}: {result.value}")
        print("    " + ", ".join(result.offenders[:12]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
