"""Doors: how a class of the user's own, named in the configuration as `package.module:Name`, is found and called."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any

from megatron_rl.contracts.exit_codes import ExitCode, Failure

MODULE_REMEDY = (
    "Put the folder that holds it on PYTHONPATH (torchrun puts launch/ on the path, not the working directory)"
)


class DoorError(Failure, ValueError):
    """A door that leads nowhere, or options that what stands behind it does not take."""

    exit_code = ExitCode.REFUSED


def open_door(key: str, name: str, options: Mapping[str, Any], *, methods: Sequence[str] = ()) -> Any:
    """Import `package.module:Name` and call it with the options as keyword arguments.

    key: the configuration key that holds the name (`reward.name`); the options' key follows from it
    (`reward.options`). methods: what the result must have. Raises `DoorError` for a module that cannot be imported, a
    name that is not in it, options that do not fit its signature, a ValueError or TypeError raised on opening, and a
    method that the result lacks.
    """
    target = _find(key, name)
    options_key = f"{key.rpartition('.')[0]}.options"
    _check_options(options_key, name, target, options)
    try:
        opened = target(**options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        raise DoorError(f"{options_key}: {name}({given}) refuses: {error}") from error
    for method in methods:
        if not hasattr(opened, method):
            raise DoorError(f"{key}={name}: it has no method `{method}`. Write one; it needs {', '.join(methods)}")
    return opened


def missing_module(name: str) -> str | None:
    """Why the module of `package.module:Name` cannot be found on the path, or None; nothing is imported.

    None also inside nested packages without an `__init__.py`, which only an import can look into.
    """
    module = name.partition(":")[0]
    parts = module.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
        for depth in range(1, len(parts)):
            inside = spec and spec.submodule_search_locations
            spec = PathFinder.find_spec(".".join(parts[: depth + 1]), list(inside)) if inside else None
    except (ImportError, KeyError, ValueError):
        return None
    return f"There is no module {module}" if spec is None else None


def _find(key: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise DoorError(f"{key}={name}: a class of your own is named package.module:Name")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise DoorError(f"{key}={name}: there is no module {error.name}. {MODULE_REMEDY}") from error
        raise DoorError(f"{key}={name}: {module} needs {error.name}, which is not installed") from error
    except Exception as error:  # the user's code: it may raise anything
        raise DoorError(f"{key}={name}: importing {module} fails ({type(error).__name__}: {error})") from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        own = [n for n, value in vars(found).items() if inspect.isclass(value) and value.__module__ == module]
        hint = _did_you_mean(attribute, own)
        raise DoorError(f"{key}={name}: {found.__file__} has no class {attribute}.{hint}") from error


def _check_options(key: str, name: str, target: Any, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some built-in classes have none; calling them tells
        return
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    takes = name + str(inspect.Signature(parameters))
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        for option in options:
            if option not in (names := [p.name for p in named]):
                raise DoorError(f"{key}.{option}: {takes} has no such option.{_did_you_mean(option, names)}")
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise DoorError(f"{key}.{parameter.name}: missing. {takes} needs it")


def _did_you_mean(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f" Did you mean {close[0]}?" if close else f" It has: {', '.join(known) or 'none'}"
