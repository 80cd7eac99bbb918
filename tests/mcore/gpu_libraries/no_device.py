"""Turns a package into one for GPUs, on a machine that has none.

Every submodule can be imported and every name exists. Classes can be subclassed. Functions and
constructors fail as they do without a driver, and say so on standard error.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def fill(package: str) -> Callable[[str], Any]:
    """Let every submodule of a package be imported. Returns the `__getattr__` of its modules."""
    sys.meta_path.append(_Finder(package))
    return lambda name: _member(package, name)


class _Finder:
    """Finds the submodules of a package, all of them empty."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{self._package}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        vars(module)["__getattr__"] = lambda member: _member(name, member)


class _Function:
    """A function without a device. It may also be a module that nothing has imported."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, member: str) -> Any:
        return _member(self.__name__, member)

    def __call__(self, *_: Any, **__: Any) -> None:
        _fail(self.__name__)


def _member(owner: str, member: str) -> Any:
    if member.startswith("__"):
        raise AttributeError(member)
    name = f"{owner}.{member}"
    if member[0].isupper():
        return type(member, (), {"__init__": lambda *_, **__: _fail(name)})
    return _Function(name)


def _fail(name: str) -> None:
    print(f"{name} was called", file=sys.stderr)
    raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")
