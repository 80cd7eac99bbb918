"""Doors: how a class of the user's own, named in the configuration as `package.module:Name`, is
found and called.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any

from megatron_rl.contracts.exit_codes import ExitCode, Failure

PYTHONPATH_REMEDY = "Put the folder that holds it on PYTHONPATH (torchrun puts launch/ on the path, not the working directory)"


_LIBRARIES = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_LONGEST_WORDS = 300  # characters of an exception's own text


class PluginError(Failure, ValueError):
    """A door that leads nowhere, options that what stands behind it does not take, or a class that
    fails.
    """

    exit_code = ExitCode.REFUSED


@contextlib.contextmanager
def user_code(
    what: str, *, propagate: tuple[type[Exception], ...] = (), failure: type[Failure] = PluginError
) -> Iterator[None]:
    """What the user's code raises within becomes a `failure` that names `what`, the error and the
    user's line.

    propagate: what the caller expects and hears as it is.
    """
    try:
        yield
    except propagate:
        raise
    except (Exception, SystemExit) as error:
        raise failure(f"{what} fails: {told(error)}") from error


def told(error: BaseException) -> str:
    """An exception of the user's code in one line, with the place in that code."""
    words = " ".join(str(error).split())
    words = words if len(words) <= _LONGEST_WORDS else f"{words[:_LONGEST_WORDS]}…"
    place = error_location(error)
    return f"{type(error).__name__}{f': {words}' if words else ''}{f' ({place})' if place else ''}"


def error_location(error: BaseException) -> str | None:
    """`file:line, in function` of the innermost frame below the one that caught it and in no
    library, or None.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    below = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name != user_code.__name__
    ][1:]
    frames = [frame for frame in below if not frame.filename.startswith("<frozen")]
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else None


def load_plugin(
    key: str,
    name: str,
    options: Mapping[str, Any],
    *,
    methods: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Import `package.module:Name` and call it with the options as keyword arguments.

    key: the configuration key that holds the name (`reward.name`); the options' key follows from it
    (`reward.options`). methods: what the result must have, with the arguments that they are called
    with. Raises `PluginError` for a module that cannot be imported, a name that is not in it,
    options that do not fit its signature, whatever is raised on opening, and a method that the
    result lacks or that takes other arguments.
    """
    target = _find(key, name)
    options_key = f"{key.rpartition('.')[0]}.options"
    _check_options(options_key, name, target, options)
    given = ", ".join(f"{option}={value!r}" for option, value in options.items())
    try:
        with user_code(f"{key}={name}: {name}({given})", propagate=(TypeError, ValueError)):
            opened = target(**options)
    except (TypeError, ValueError) as error:
        if isinstance(error, PluginError):
            raise
        place = error_location(error)
        at = f" ({place})" if place else ""
        raise PluginError(f"{options_key}: {name}({given}) refuses: {error}{at}") from error
    for method, arguments in (methods or {}).items():
        with user_code(f"{key}={name}: `{method}`", propagate=(PluginError,)):
            if not hasattr(opened, method):
                needed = ", ".join(methods or ())
                raise PluginError(
                    f"{key}={name}: it has no method `{method}`. Write one; it needs {needed}"
                )
            _check_call(f"{key}={name}: `{method}`", getattr(opened, method), arguments)
    return opened


def _check_call(what: str, method: Any, arguments: Sequence[str]) -> None:
    if not callable(method):
        raise PluginError(f"{what} is no method but {type(method).__name__}. Write a method")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # some built-in methods have none; calling them tells
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(arguments)
        raise PluginError(
            f"{what} is called with ({wanted}), and takes {signature}: {error}. Take these"
        ) from error


def missing_module(name: str) -> str | None:
    """Why the module of `package.module:Name` cannot be found on the path, or None; nothing is
    imported.

    None also inside nested packages without an `__init__.py`, which only an import can look into.
    """
    module = name.partition(":")[0]
    parts = module.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
        for depth in range(1, len(parts)):
            inside = spec and spec.submodule_search_locations
            spec = (
                PathFinder.find_spec(".".join(parts[: depth + 1]), list(inside)) if inside else None
            )
    except (ImportError, KeyError, ValueError):
        return None
    return f"There is no module {module}" if spec is None else None


def _find(key: str, name: str) -> Any:
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise PluginError(f"{key}={name}: a class of your own is named package.module:Name")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise PluginError(
                f"{key}={name}: there is no module {error.name}. {PYTHONPATH_REMEDY}"
            ) from error
        raise PluginError(
            f"{key}={name}: {module} needs {error.name}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:  # the user's code: it may raise anything
        raise PluginError(f"{key}={name}: importing {module} fails: {told(error)}") from error
    try:
        return getattr(found, attribute)
    except AttributeError as error:
        own = [
            n
            for n, value in vars(found).items()
            if inspect.isclass(value) and value.__module__ == module
        ]
        hint = _did_you_mean(attribute, own)
        if found.__spec__ is not None and found.__spec__.origin is None:
            folders = ", ".join(map(str, found.__path__))
            where = f"{module} is a folder without an __init__.py ({folders}), not a file. Name one: {module}.FILE:"
            raise PluginError(f"{key}={name}: {where}{attribute}") from error
        raise PluginError(
            f"{key}={name}: {found.__file__} has no class {attribute}.{hint}"
        ) from error


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
                raise PluginError(
                    f"{key}.{option}: {takes} has no such option.{_did_you_mean(option, names)}"
                )
    for parameter in named:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise PluginError(f"{key}.{parameter.name}: missing. {takes} needs it")


def _did_you_mean(given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    return f" Did you mean {close[0]}?" if close else f" It has: {', '.join(known) or 'none'}"
