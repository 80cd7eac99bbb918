"""The code keeps its shape: rooms with names, small files, short functions, docstrings that say
what files are for.
"""

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("launch", "megatron_rl", "sglang_bridge", "kernels")
MOST_ENTRIES, MEDIAN_LINES, MOST_LINES, MOST_FUNCTION_LINES = 16, 80, 350, 50


def source_files() -> dict[str, str]:
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


def functions_of(source: str) -> Iterator[tuple[str, int]]:
    """Every function's name and its lines, decorators and docstring included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or first) - first + 1


def unproven(docstring: str, tests: dict[str, set[str]]) -> list[str]:
    """Invariants that name no test, or one that does not exist.

    tests: functions by file, from the root.
    """
    broken = []
    for paragraph in docstring.split("\n\n"):
        if "Invariant:" in paragraph:
            named = re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", paragraph)
            if not named or any(
                file not in tests or (name and name not in tests[file]) for file, name in named
            ):
                broken.append(paragraph)
    return broken


@pytest.fixture(scope="module")
def files() -> dict[str, str]:
    return source_files()


def test_the_rooms_can_be_seen_at_a_glance() -> None:
    entries = [path for path in (ROOT / "megatron_rl").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MOST_ENTRIES
    assert [path.name for path in entries if path.is_file() and path.suffix == ".py"] == [
        "__init__.py"
    ]


def test_files_are_small(files: dict[str, str]) -> None:
    lines = {
        name: len(text.splitlines())
        for name, text in files.items()
        if not name.endswith("__init__.py")
    }
    assert len(lines) > 30
    assert {name: count for name, count in lines.items() if count > MOST_LINES} == {}
    assert statistics.median(lines.values()) <= MEDIAN_LINES
    assert lines["megatron_rl/run/build.py"] <= 100


def test_functions_are_short(files: dict[str, str]) -> None:
    long = [
        f"{name}: {function} has {count} lines"
        for name, text in files.items()
        for function, count in functions_of(text)
        if count > MOST_FUNCTION_LINES
    ]
    assert long == []


def test_every_file_says_what_it_does(files: dict[str, str]) -> None:
    silent = [
        name
        for name, text in files.items()
        if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert silent == []


def test_an_invariant_names_the_test_that_enforces_it(files: dict[str, str]) -> None:
    tests = {
        str(path.relative_to(ROOT)): {name for name, _ in functions_of(path.read_text())}
        for path in (ROOT / "tests").rglob("*.py")
    }
    claims = [f"{name}: {claim}" for name, text in files.items() for claim in unproven(text, tests)]
    assert claims == []
    known = {"tests/a.py": {"test_b"}}
    assert unproven("What.\n\nInvariant: it holds (tests/a.py::test_b).", known) == []
    assert (
        len(
            unproven("What.\n\nInvariant: it holds.\n\nInvariant: too (tests/a.py::test_c).", known)
        )
        == 2
    )


def test_kernels_folder_is_no_package() -> None:
    """SGLang depends on a distribution whose top-level package is called `kernels`; ours would
    shadow it.
    """
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_function_lengths_are_measured() -> None:
    source = "@decorator\ndef f():\n    pass\n\nclass A:\n    async def g(self):\n        x = 1\n        return x\n"
    assert list(functions_of(source)) == [("f", 3), ("g", 3)]
