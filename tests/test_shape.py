"""Shape of the code: rooms of a size that can be read, and no dense code or private names."""

import gc
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import shape
from tests.support.style import (
    MAX_PARTICIPLES_PER_1000,
    Source,
    functions_of,
    has_docstring,
    participles_per_1000,
    problems_of,
)

ROOT = Path(__file__).resolve().parents[1]
SOURCE_FOLDERS = ("launch", "megatron_rl", "sglang_bridge", "kernels")
MAX_MODULES = 16
MAX_ROOMS = 16


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return shape.read_sources(SOURCE_FOLDERS)


@pytest.fixture(scope="module")
def test_sources() -> dict[str, Source]:
    return shape.read_sources(["tests"])


def list_problems(sources: dict[str, Source]) -> list[str]:
    return [
        f"{name}:{problem.line}: {problem.text}"
        for name, source in sources.items()
        for problem in problems_of(source)
    ]


def test_source_follows_the_style(sources: dict[str, Source]) -> None:
    assert len(sources) > 300, "are the folders right?"
    assert list_problems(sources) == []


def test_tests_follow_the_style(test_sources: dict[str, Source]) -> None:
    assert len(test_sources) > 200, "is the folder right?"
    assert list_problems(test_sources) == []


def test_bare_participles_are_rare(
    sources: dict[str, Source], test_sources: dict[str, Source]
) -> None:
    assert participles_per_1000(sources.values()) <= MAX_PARTICIPLES_PER_1000
    assert participles_per_1000(test_sources.values()) <= MAX_PARTICIPLES_PER_1000


def test_every_module_has_a_docstring(sources: dict[str, Source]) -> None:
    assert [name for name, source in sources.items() if not has_docstring(source)] == []
    assert not has_docstring(Source.parse("a = 1\n"))
    assert has_docstring(Source.parse('"""A module."""\n')) and has_docstring(Source.parse(""))


def crowded_folders(names: list[str]) -> dict[str, int]:
    """Folders with too many modules. `__init__.py` does not count."""
    counts: dict[str, int] = {}
    for name in names:
        path = Path(name)
        if path.name != "__init__.py":
            counts[str(path.parent)] = counts.get(str(path.parent), 0) + 1
    return {folder: count for folder, count in counts.items() if count > MAX_MODULES}


def test_a_folder_has_few_modules(sources: dict[str, Source]) -> None:
    assert crowded_folders(list(sources)) == {}


def test_the_trainer_consists_of_few_rooms() -> None:
    entries = [path for path in (ROOT / "megatron_rl").iterdir() if path.name != "__pycache__"]
    assert len(entries) <= MAX_ROOMS + 1
    modules = [path.name for path in entries if path.suffix == ".py"]
    assert modules == ["__init__.py"]


def invariants(docstring: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each invariant with the tests that it names, as (file, function or "")."""
    for paragraph in docstring.split("\n\n"):
        if "Invariant:" in paragraph:
            yield paragraph, re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", paragraph)


def unproven(docstring: str, tests: dict[str, set[str]]) -> list[str]:
    """Invariants that name no test, or one that does not exist.

    tests: the functions of each test file.
    """
    return [
        paragraph
        for paragraph, names in invariants(docstring)
        if not names
        or any(file not in tests or (name and name not in tests[file]) for file, name in names)
    ]


def test_an_invariant_names_the_test_that_enforces_it(
    sources: dict[str, Source], test_sources: dict[str, Source]
) -> None:
    tests = {
        name: {function.name for function in functions_of(source)}
        for name, source in test_sources.items()
    }
    claims = [
        f"{name}: {claim}"
        for name, source in sources.items()
        for claim in unproven(source.text, tests)
    ]
    assert claims == []


def test_kernels_folder_is_no_package() -> None:
    """SGLang depends on a package called `kernels`, which ours would hide."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


BRANCHES = "\n".join(f"    if x == {i}:\n        return {i}" for i in range(12))
OFFENDERS = {
    "complexity": f"def f(x):\n{BRANCHES}\n",
    "levels of comprehensions": "def f(x):\n    return [[[c for c in b] for b in a] for a in x]\n",
    "parallel assignment": "a, b = 1, 2\n",
    "vague opening": 'def f():\n    """What it returns."""\n',
    "columns": f"a = '{'x' * 100}'\n",
}
CORRECT = '''"""A module."""

def f(x, y):
    """Swap and sum."""
    x, y = y, x
    return [[b for b in a] for a in (x, y)]
'''


@pytest.mark.parametrize("problem", OFFENDERS)
def test_each_rule_finds_a_planted_offender(problem: str) -> None:
    texts = [offender.text for offender in problems_of(Source.parse(OFFENDERS[problem]))]
    assert len(texts) == 1 and problem in texts[0]


def test_correct_code_has_no_problem() -> None:
    assert list(problems_of(Source.parse(CORRECT))) == []


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "x.told = 1",
        "def f(given): ...",
        "def wanted(): ...",
        "class own: ...",
        "try: ...\nexcept OSError as refused: ...",
        "import x as used",
        "[kept for kept in y]",
    ],
)
def test_each_kind_of_bound_name_is_measured(source: str) -> None:
    assert participles_per_1000([Source.parse(source)]) > 0


def test_nouns_and_longer_names_are_no_participles() -> None:
    source = Source.parse("seed = speed = found_files = is_used = 1")
    assert participles_per_1000([source]) == 0


def test_a_crowded_folder_is_found() -> None:
    names = [f"a/m{i}.py" for i in range(16)]
    assert crowded_folders([*names, "a/__init__.py", "a/b/c.py"]) == {}
    assert crowded_folders([*names, "a/m16.py"]) == {"a": 17}


def test_an_invariant_without_a_test_is_found() -> None:
    tests = {"tests/a.py": {"test_b"}}
    assert unproven("A.\n\nInvariant: it holds (tests/a.py::test_b).", tests) == []
    for claim in ("it holds.", "it holds (tests/a.py::test_c).", "it holds (tests/b.py)."):
        assert len(unproven(f"A.\n\nInvariant: {claim}", tests)) == 1


# The present values. A change may lower a limit, and a new offender has to replace one.
LIMITS = {
    "write pairs": 18,
    "constructor parameters": 12,
    "private constructor parameters": 0,
    "protocols with one implementation": 0,
    "exceptions that nobody catches": 0,
    "message kinds": 14,
    "keys": 143,
    "tests of private names": 0,
    "entries of launch/ without a command": 0,
}


@pytest.fixture(scope="module", autouse=True)
def no_garbage() -> Iterator[None]:
    """Free what earlier tests have left, and do not look for garbage among the trees.

    A finalizer that prints a traceback parses code. While this module parses, Python would take
    that for an error of its own: "AST constructor recursion depth mismatch".
    """
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def measures(
    sources: dict[str, Source], test_sources: dict[str, Source]
) -> dict[str, shape.Measure]:
    trainer_sources = {
        name: source
        for name, source in sources.items()
        if name.startswith(tuple(f"{folder}/" for folder in shape.SOURCE_FOLDERS))
    }
    return shape.measure(trainer_sources, test_sources)


@pytest.mark.parametrize("name", LIMITS)
def test_relations_do_not_grow(measures: dict[str, shape.Measure], name: str) -> None:
    assert measures[name].value <= LIMITS[name], measures[name].offenders


PLANTED = """
@dataclass
class Counter:
    limit: int
    _count: int = 0
    _log: list = field(default_factory=list, init=False)

    def add(self, name):
        self._count += 1
        self._log.append(name)
        self.part.state[name] = 1
        del self.part.other
        local.count = 1

    def read(self): return self._count
    def has(self): return bool(self._log)
    def name(self): return self.part.name

class Reader(Protocol):
    def read(self): ...
    def has(self): ...

class Expected(Exception): ...
class Unexpected(Exception): ...
class Derived(Unexpected): ...

try: ...
except (OSError, Expected): ...

def test_a(): assert box._items == [] and self._own
def test_b(monkeypatch): monkeypatch.setattr("a.b._c", 1)
def test_c(): assert box.items == []
"""


def test_each_relation_is_measured() -> None:
    sources = {"a.py": Source.parse(PLANTED)}
    classes = shape.classes_of(sources)
    counter = classes[0]
    pairs = {attribute for _, attribute in shape.write_pairs(counter)}
    assert pairs == {"_count", "_log", "part.state", "part.other"}
    assert shape.constructor_parameters(counter) == ["limit", "_count"]
    assert shape.lonely_protocols(classes) == ["Reader"]
    assert shape.uncaught_exceptions(classes, sources.values()) == ["Derived", "Unexpected"]
    assert shape.tests_of_private_names(sources) == ["a.py::test_a", "a.py::test_b"]
