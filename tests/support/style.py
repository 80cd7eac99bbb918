"""Measures of code style, which tests/test_shape.py enforces.

`python -m tests.support.style PATH ...` lists every problem in files and folders.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MAX_COMPLEXITY = 12
MAX_COMPREHENSION_DEPTH = 2
MAX_COLUMNS = 100
MAX_PARTICIPLES_PER_1000 = 2.0


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Participles that do not end in "ed", and other words that name no thing
_IRREGULAR_PARTICIPLES = _words(
    """
    begun bought broken brought built caught chosen dealt done drawn driven eaten fallen fed felt
    forgotten found frozen given gone grown heard held hidden kept known laid led lent lost made
    meant met most of own paid proven ridden risen said seen sent shown sold sought spent spoken
    stood struck stuck taken taught thought thrown told understood woken won worn written
    """
)
_NOUNS_IN_ED = _words("bed breed creed deed embed feed heed need red seed shed speed weed")
# Pronouns and question words, with which a docstring must not begin
_VAGUE_OPENINGS = _words("How It Of That They Those What When Where Whether Which Who Why")
_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.IfExp,
    ast.comprehension,
    ast.match_case,
)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def walk(tree: ast.AST) -> list[ast.AST]:
    """Return a node and all below it, as `ast.walk` yields them, in half of its time."""
    nodes = [tree]
    for node in nodes:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                nodes += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                nodes.append(value)
    return nodes


@dataclass(frozen=True)
class Source:
    """A file of Python code. nodes: of its tree, by their classes."""

    text: str
    tree: ast.Module
    nodes: Mapping[type[ast.AST], list[ast.AST]]

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse the text of a file."""
        tree = ast.parse(text)
        nodes: dict[type[ast.AST], list[ast.AST]] = {}
        for node in walk(tree):
            nodes.setdefault(type(node), []).append(node)
        return cls(text, tree, nodes)

    def of[Node: ast.AST](self, *kinds: type[Node]) -> Iterator[Node]:
        """Yield the nodes of some classes, one class after the other."""
        for kind in kinds:
            yield from self.nodes.get(kind, ())  # type: ignore[misc]


def parse_all(texts: Mapping[str, str]) -> dict[str, Source]:
    """Parse files by their names.

    The collector of garbage would look through all trees again and again, which takes most of the
    time. There is no garbage here.
    """
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        return {name: Source.parse(text) for name, text in texts.items()}
    finally:
        if is_collecting:
            gc.enable()


class Problem(NamedTuple):
    """A place that breaks a rule."""

    line: int
    text: str


class Name(NamedTuple):
    """A name that the code binds."""

    line: int
    name: str


def is_participle(name: str) -> bool:
    """True for a name that is one bare participle, such as `found` or `_wanted`."""
    word = name.strip("_")
    if word in _IRREGULAR_PARTICIPLES:
        return True
    return word.isalpha() and word.islower() and word.endswith("ed") and word not in _NOUNS_IN_ED


def bound_names(source: Source) -> Iterator[Name]:
    """Yield every name that the code binds.

    These are variables, arguments, attributes, functions, classes, exceptions and import aliases.
    """
    for variable in source.of(ast.Name):
        if isinstance(variable.ctx, ast.Store):
            yield Name(variable.lineno, variable.id)
    for attribute in source.of(ast.Attribute):
        if isinstance(attribute.ctx, ast.Store):
            yield Name(attribute.lineno, attribute.attr)
    for argument in source.of(ast.arg):
        yield Name(argument.lineno, argument.arg)
    for function in functions_of(source):
        yield Name(function.lineno, function.name)
    for item in source.of(ast.ClassDef):
        yield Name(item.lineno, item.name)
    for handler in source.of(ast.ExceptHandler):
        if handler.name is not None:
            yield Name(handler.lineno, handler.name)
    for alias in source.of(ast.alias):
        if alias.asname is not None:
            yield Name(alias.lineno, alias.asname)


def participles(source: Source) -> list[Name]:
    """All bound names that are bare participles."""
    return [name for name in bound_names(source) if is_participle(name.name)]


def functions_of(source: Source) -> Iterator[Function]:
    """Yield every function and method, nested ones included."""
    yield from source.of(ast.FunctionDef)
    yield from source.of(ast.AsyncFunctionDef)


def complexity(nodes: Iterable[ast.AST]) -> int:
    """McCabe's number: 1 + branches. Each further operand of `and` or `or` is a branch.

    nodes: all of a function.
    """
    branches = 0
    for node in nodes:
        if isinstance(node, _BRANCHES):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
    return 1 + branches


def comprehension_levels(nodes: Iterable[ast.AST]) -> int:
    """The number of comprehensions that are nested in each other. nodes: all of a function."""
    return max(
        (comprehension_depth(node) for node in nodes if isinstance(node, _COMPREHENSIONS)),
        default=0,
    )


def comprehension_depth(node: ast.AST) -> int:
    """The number of comprehensions in a node that are nested in each other."""
    depths = [comprehension_depth(child) for child in ast.iter_child_nodes(node)]
    return max(depths, default=0) + isinstance(node, _COMPREHENSIONS)


def dense_functions(source: Source) -> Iterator[Problem]:
    """Yield functions with too many branches or nested comprehensions."""
    measures: list[tuple[str, Callable[[Iterable[ast.AST]], int], int]] = [
        ("complexity", complexity, MAX_COMPLEXITY),
        ("levels of comprehensions", comprehension_levels, MAX_COMPREHENSION_DEPTH),
    ]
    for function in functions_of(source):
        nodes = walk(function)
        for name, measure, limit in measures:
            value = measure(nodes)
            if value > limit:
                text = f"{function.name}: {value} {name} (at most {limit})"
                yield Problem(function.lineno, text)


def parallel_assignments(source: Source) -> Iterator[Problem]:
    """Yield assignments such as `a, b = x, y`, except swaps."""
    for node in source.of(ast.Assign):
        if not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
            continue
        names = sorted(ast.unparse(element) for element in target.elts)
        values = sorted(ast.unparse(element) for element in node.value.elts)
        if names != values:
            yield Problem(node.lineno, "parallel assignment of unrelated values")


def vague_docstrings(source: Source) -> Iterator[Problem]:
    """Yield docstrings that begin with a pronoun or a question word instead of a verb or a noun."""
    for node in (source.tree, *source.of(ast.ClassDef), *functions_of(source)):
        text = ast.get_docstring(node) or ""
        words = text.split(maxsplit=1)
        if words and words[0].strip(":,'") in _VAGUE_OPENINGS:
            line = getattr(node, "lineno", 1)
            yield Problem(line, f"vague opening of a docstring: {text.splitlines()[0]}")


def has_docstring(source: Source) -> bool:
    """True for a module with a docstring, or without any code."""
    return not source.tree.body or ast.get_docstring(source.tree) is not None


def long_lines(source: Source) -> Iterator[Problem]:
    """Yield lines with too many columns."""
    for number, text in enumerate(source.text.splitlines(), 1):
        if len(text) > MAX_COLUMNS:
            yield Problem(number, f"{len(text)} columns (at most {MAX_COLUMNS})")


RULES = (dense_functions, parallel_assignments, vague_docstrings, long_lines)


def problems_of(source: Source) -> Iterator[Problem]:
    """Yield everything in a file that breaks a rule, except participles, which are a share."""
    for rule in RULES:
        yield from rule(source)


def participles_per_1000(sources: Iterable[Source]) -> float:
    """The share of bare participles among all bound names, per 1,000."""
    count = 0
    total = 0
    for source in sources:
        names = list(bound_names(source))
        count += sum(is_participle(name.name) for name in names)
        total += len(names)
    return 1000 * count / max(total, 1)


def files_in(argument: str) -> Iterator[Path]:
    """Yield a file, or the Python files of a folder."""
    path = Path(argument)
    yield from [path] if path.is_file() else sorted(path.rglob("*.py"))


def main(arguments: list[str]) -> int:
    """Print the problems of files and folders. Returns 1 if there are any."""
    files = [file for argument in arguments for file in files_in(argument)]
    count = 0
    for file in files:
        source = Source.parse(file.read_text())
        problems = list(problems_of(source))
        for name in participles(source):
            problems.append(Problem(name.line, f"`{name.name}` is a bare participle"))
        for problem in problems:
            print(f"{file}:{problem.line}: {problem.text}")
        count += len(problems)
    print(f"{count} problems in {len(files)} files")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
