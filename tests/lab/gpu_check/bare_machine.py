"""A machine with torch, transformers, their requirements and the bundle, and nothing else."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[3]
TYPICAL = ("torch", "triton", "transformers", "numpy", "setuptools", "pip")
_BLOCKER = '''"""Written by a test: these top-level modules cannot be imported."""
import sys

BLOCKED = frozenset({names!r})

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


def normalize(name: str) -> str:
    """The normalized name of a distribution, by which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def bundle_names() -> list[str]:
    """Distributions in the bundle."""
    lines = (ROOT / "requirements" / "gpu-carry-base.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def closure(names: Iterable[str]) -> set[str]:
    """Distributions and everything they require that is installed, without extras."""
    members: set[str] = set()
    queue = [normalize(name) for name in names]
    while queue:
        name = queue.pop()
        if name in members:
            continue
        try:
            lines = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        members.add(name)
        requirements = [Requirement(line) for line in lines]
        queue += [
            normalize(requirement.name)
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
    return members


def write_blocker(directory: Path, extra: Iterable[str] = ()) -> None:
    """Write a `sitecustomize` that makes this interpreter one of a bare machine.

    extra: further distributions of the machine.
    """
    others = {normalize(name) for name in (*bundle_names(), *extra, "espo-megatron-rl")}
    present = closure(TYPICAL) | others
    modules = importlib.metadata.packages_distributions()
    names = {
        module
        for module, owners in modules.items()
        if not {normalize(owner) for owner in owners} & present
    }
    # setuptools brings these along.
    folder = importlib.metadata.distribution("setuptools").locate_file("setuptools/_vendor")
    names -= {file.name.removesuffix(".py") for file in Path(str(folder)).iterdir()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "sitecustomize.py").write_text(_BLOCKER.format(names=sorted(names)))
