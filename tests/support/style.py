"""Measures of code style that the shape tests hold. `python -m tests.support.style PATH ...` lists what breaks them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MAX_NODES = 300
MAX_COMPLEXITY = 12
MAX_PARTICIPLES_PER_1000 = 2.0

_IRREGULAR = frozenset(
    [
        "found",
        "told",
        "given",
        "kept",
        "held",
        "said",
        "known",
        "taken",
        "drawn",
        "gone",
        "begun",
        "made",
        "done",
        "seen",
        "sent",
        "lost",
        "shown",
        "written",
        "chosen",
        "built",
        "brought",
        "bought",
        "caught",
        "dealt",
        "fed",
        "felt",
        "grown",
        "heard",
        "hidden",
        "laid",
        "led",
        "lent",
        "meant",
        "met",
        "paid",
        "proven",
        "sought",
        "sold",
        "spent",
        "spoken",
        "stood",
        "struck",
        "stuck",
        "taught",
        "thought",
        "thrown",
        "understood",
        "woken",
        "worn",
        "won",
        "forgotten",
        "broken",
        "fallen",
        "eaten",
        "driven",
        "ridden",
        "risen",
        "frozen",
        "own",
        "of",
        "most",
    ]
)
_NOUNS_IN_ED = frozenset(
    [
        "seed",
        "speed",
        "need",
        "feed",
        "embed",
        "shed",
        "weed",
        "bed",
        "red",
        "breed",
        "creed",
        "deed",
        "heed",
    ]
)
_VAGUE_OPENINGS = frozenset(
    [
        "What",
        "Whether",
        "How",
        "Of",
        "Those",
        "Which",
        "Where",
        "Who",
        "Why",
        "When",
        "That",
        "It",
        "They",
    ]
)
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

Function = ast.FunctionDef | ast.AsyncFunctionDef


def is_participle(name: str) -> bool:
    """True for a name that is one bare participle, such as `found` or `_wanted`."""
    word = name.strip("_")
    if word in _IRREGULAR:
        return True
    return word.isalpha() and word.islower() and word.endswith("ed") and word not in _NOUNS_IN_ED


def bound_names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that the code binds, with its line: variables, arguments, attributes, functions, classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, Function | ast.ClassDef):
            yield node.name, node.lineno


def functions_of(tree: ast.AST) -> Iterator[Function]:
    """Every function and method, nested ones included."""
    yield from (node for node in ast.walk(tree) if isinstance(node, Function))


def node_count(function: Function) -> int:
    """The number of syntax nodes of a function."""
    return sum(1 for _ in ast.walk(function))


def complexity(function: Function) -> int:
    """McCabe's number: 1 + branches, where each further operand of `and` or `or` is a branch."""
    branches = 1
    for node in ast.walk(function):
        if isinstance(node, _BRANCHES):
            branches += 1
        elif isinstance(node, ast.BoolOp):
            branches += len(node.values) - 1
    return branches


def comprehension_depth(node: ast.AST) -> int:
    """How many comprehensions lie in each other."""
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    deepest = max((comprehension_depth(child) for child in ast.iter_child_nodes(node)), default=0)
    return deepest + isinstance(node, kinds)


def parallel_assignments(tree: ast.AST) -> Iterator[int]:
    """Lines of `a, b = x, y`, except swaps."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
            continue
        targets = node.targets[0]
        if not isinstance(targets, ast.Tuple) or len(targets.elts) != len(node.value.elts):
            continue
        names = sorted(ast.unparse(element) for element in targets.elts)
        values = sorted(ast.unparse(element) for element in node.value.elts)
        if names != values:
            yield node.lineno


def vague_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings that begin with a pronoun or a question word instead of a verb or a noun."""
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            opening = text.split(maxsplit=1)[0].strip(":,'") if text else ""
            if opening in _VAGUE_OPENINGS:
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def problems_of(source: str) -> Iterator[str]:
    """Everything in a file that breaks a rule, one line each; the participles are counted by the caller."""
    tree = ast.parse(source)
    for function in functions_of(tree):
        if (count := node_count(function)) > MAX_NODES:
            yield f"{function.lineno}: {function.name} has {count} syntax nodes (at most {MAX_NODES})"
        if (branches := complexity(function)) > MAX_COMPLEXITY:
            yield f"{function.lineno}: {function.name} has complexity {branches} (at most {MAX_COMPLEXITY})"
        if (depth := comprehension_depth(function)) > 2:
            yield f"{function.lineno}: {function.name} nests {depth} comprehensions (at most 2)"
    for line in parallel_assignments(tree):
        yield f"{line}: parallel assignment of unrelated values"
    for line, text in vague_docstrings(tree):
        yield f"{line}: docstring begins with no verb and no noun: {text}"
    for number, text in enumerate(source.splitlines(), 1):
        if len(text) > 100:
            yield f"{number}: {len(text)} columns (at most 100)"


def main(arguments: list[str]) -> int:
    """Print the problems of files and folders; 1 when there are any."""
    files = [
        file
        for argument in arguments
        for file in ([Path(argument)] if argument.endswith(".py") else Path(argument).rglob("*.py"))
    ]
    count = 0
    for file in sorted(files):
        source = file.read_text()
        lines = list(problems_of(source))
        lines += [
            f"{line}: `{name}` is a bare participle"
            for name, line in bound_names(ast.parse(source))
            if is_participle(name)
        ]
        for line in lines:
            print(f"{file}:{line}")
        count += len(lines)
    print(f"{count} problems in {len(files)} files")
    return bool(count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
