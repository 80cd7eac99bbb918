"""A machine that has torch and transformers, what those bring, and the bundle: nothing else can be
imported there.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TYPICAL = ("torch", "triton", "transformers", "numpy", "setuptools", "pip")
_BLOCKER = '''"""Made by a test: these top-level modules are not there."""
import sys

BLOCKED = frozenset({blocked!r})

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
'''


def normal(name: str) -> str:
    """A distribution's name as they are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def bundled() -> list[str]:
    lines = (ROOT / "requirements" / "gpu-bundle.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def closure(names: Iterable[str]) -> set[str]:
    """Distributions with what they require, as far as it is installed; no extras."""
    found: set[str] = set()
    waiting = [normal(name) for name in names]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        found.add(name)
        requirements = [Requirement(line) for line in required]
        waiting += [
            normal(r.name)
            for r in requirements
            if r.marker is None or r.marker.evaluate({"extra": ""})
        ]
    return found


def write_blocker(directory: Path, also: Iterable[str] = ()) -> None:
    """A `sitecustomize` that makes this interpreter a bare machine's.

    also: distributions that it shall have too.
    """
    own = {"espo-megatron-rl"}
    allowed = (
        closure(TYPICAL)
        | {normal(name) for name in bundled()}
        | {normal(name) for name in also}
        | own
    )
    by_module = importlib.metadata.packages_distributions()
    blocked = {
        top for top, names in by_module.items() if not {normal(name) for name in names} & allowed
    }
    folder = importlib.metadata.distribution("setuptools").locate_file("setuptools/_vendor")
    blocked -= {
        file.name.removesuffix(".py") for file in Path(str(folder)).iterdir()
    }  # it brings these along
    directory.mkdir(parents=True, exist_ok=True)
    text = _BLOCKER.format(blocked=sorted(blocked))
    (directory / "sitecustomize.py").write_text(text)
