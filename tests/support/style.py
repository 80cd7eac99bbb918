"""Measures of code style, which tests/test_shape.py enforces.

`python -m tests.support.style PATH ...` lists every problem in files and folders.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterable, Iterator
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


def bound_names(tree: ast.AST) -> Iterator[Name]:
    """Yield every name that the code binds.

    These are variables, arguments, attributes, functions, classes, exceptions and import aliases.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield Name(node.lineno, node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield Name(node.lineno, node.attr)
        elif isinstance(node, ast.arg):
            yield Name(node.lineno, node.arg)
        elif isinstance(node, Function | ast.ClassDef) or (
            isinstance(node, ast.ExceptHandler) and node.name is not None
        ):
            yield Name(node.lineno, node.name)
        elif isinstance(node, ast.alias) and node.asname is not None:
            yield Name(node.lineno, node.asname)


def participles(tree: ast.AST) -> list[Name]:
    """All bound names that are bare participles."""
    return [name for name in bound_names(tree) if is_participle(name.name)]


def functions_of(tree: ast.AST) -> Iterator[Function]:
    """Yield every function and method, nested ones included."""
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def complexity(function: Function) -> int:
    """McCabe's number: 1 + branches. Each further operand of `and` or `or` is a branch."""
    branches = 0
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
    return 1 + branches


def comprehension_depth(node: ast.AST) -> int:
    """The number of comprehensions that are nested in each other."""
    depths = [comprehension_depth(child) for child in ast.iter_child_nodes(node)]
    return max(depths, default=0) + isinstance(node, _COMPREHENSIONS)


def dense_functions(tree: ast.Module, source: str) -> Iterator[Problem]:
    """Yield functions with too many branches or nested comprehensions."""
    measures: list[tuple[str, Callable[[Function], int], int]] = [
        ("complexity", complexity, MAX_COMPLEXITY),
        ("levels of comprehensions", comprehension_depth, MAX_COMPREHENSION_DEPTH),
    ]
    for function in functions_of(tree):
        for name, measure, limit in measures:
            value = measure(function)
            if value > limit:
                text = f"{function.name}: {value} {name} (at most {limit})"
                yield Problem(function.lineno, text)


def parallel_assignments(tree: ast.Module, source: str) -> Iterator[Problem]:
    """Yield assignments such as `a, b = x, y`, except swaps."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        target = node.targets[0]
        if not isinstance(target, ast.Tuple) or len(target.elts) != len(node.value.elts):
            continue
        names = sorted(ast.unparse(element) for element in target.elts)
        values = sorted(ast.unparse(element) for element in node.value.elts)
        if names != values:
            yield Problem(node.lineno, "parallel assignment of unrelated values")


def vague_docstrings(tree: ast.Module, source: str) -> Iterator[Problem]:
    """Yield docstrings that begin with a pronoun or a question word instead of a verb or a noun."""
    for node in ast.walk(tree):
        if not isinstance(node, Function | ast.ClassDef | ast.Module):
            continue
        text = ast.get_docstring(node) or ""
        words = text.split(maxsplit=1)
        if words and words[0].strip(":,'") in _VAGUE_OPENINGS:
            line = getattr(node, "lineno", 1)
            yield Problem(line, f"vague opening of a docstring: {text.splitlines()[0]}")


def has_docstring(source: str) -> bool:
    """True for a module with a docstring, or without any code."""
    tree = ast.parse(source)
    return not tree.body or ast.get_docstring(tree) is not None


def long_lines(tree: ast.Module, source: str) -> Iterator[Problem]:
    """Yield lines with too many columns."""
    for number, text in enumerate(source.splitlines(), 1):
        if len(text) > MAX_COLUMNS:
            yield Problem(number, f"{len(text)} columns (at most {MAX_COLUMNS})")


RULES = (dense_functions, parallel_assignments, vague_docstrings, long_lines)


def problems_of(source: str) -> Iterator[Problem]:
    """Yield everything in a file that breaks a rule, except participles, which are a share."""
    tree = ast.parse(source)
    for rule in RULES:
        yield from rule(tree, source)


def participles_per_1000(sources: Iterable[str]) -> float:
    """The share of bare participles among all bound names, per 1,000."""
    count = 0
    total = 0
    for source in sources:
        tree = ast.parse(source)
        count += len(participles(tree))
        total += sum(1 for _ in bound_names(tree))
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
        source = file.read_text()
        problems = list(problems_of(source))
        for name in participles(ast.parse(source)):
            problems.append(Problem(name.line, f"`{name.name}` is a bare participle"))
        for problem in problems:
            print(f"{file}:{problem.line}: {problem.text}")
        count += len(problems)
    print(f"{count} problems in {len(files)} files")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
