"""Plugins: user-defined classes that the configuration names as `package.module:Name`.

Options that name environment variables, such as `${oc.env:JUDGE_KEY}`, keep the name in the
configuration, in checkpoints and in messages. Each process reads the values when it constructs the
plugin.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_rl.contracts.exit_codes import ExitCode, Failure

PYTHONPATH_REMEDY = (
    "Put the folder that holds it on PYTHONPATH "
    "(torchrun puts launch/ on the path, not the working directory)"
)

_LIBRARIES = tuple(
    {sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
# An environment variable in an option, such as ${oc.env:JUDGE_KEY}
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*([^},\s]+)")
_MAX_MESSAGE_LENGTH = 300  # characters of an exception's message


class PluginError(Failure, ValueError):
    """A plugin that cannot be imported, does not accept its options, or fails."""

    exit_code = ExitCode.REFUSED


@contextlib.contextmanager
def user_code(
    action: str,
    *,
    propagate: tuple[type[Exception], ...] = (),
    failure: type[Failure] = PluginError,
    options: Mapping[str, Any] | None = None,
) -> Iterator[None]:
    """Convert exceptions of user-defined code into a `failure`.

    action: name of the call. The failure's message names it, the exception and the user's line.
    propagate: exceptions that are not converted, because the caller handles them.
    options: of the class. The message does not contain the values of their environment variables.
    """
    try:
        yield
    except propagate:
        raise
    except (Exception, SystemExit) as error:
        text = hide_values(f"{action} fails: {describe_error(error, options)}", options)
        # An exception that contains the value must not be shown as the cause.
        raise failure(text) from (None if _shows_values(error, options) else error)


def hide_values(text: str, options: Any) -> str:
    """Replace the values of the options' environment variables in a text by their names."""
    for name in _variable_names(options):
        value = os.environ.get(name)
        if value:
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text


def error_text(error: BaseException) -> str:
    """Return the message of an exception. A user-defined exception may fail to give one."""
    try:
        return str(error)
    except Exception:
        return "(its message cannot be read)"


def describe_error(error: BaseException, options: Mapping[str, Any] | None = None) -> str:
    """Return an exception of user-defined code and its location, on one line.

    options: see `user_code`. Values are removed before a long message is cut off, because a cut
    could leave a part of a value.
    """
    message = " ".join(hide_values(error_text(error), options).split())
    if len(message) > _MAX_MESSAGE_LENGTH:
        message = f"{message[:_MAX_MESSAGE_LENGTH]}…"
    location = error_location(error)
    description = type(error).__name__
    if message:
        description += f": {message}"
    if location:
        description += f" ({location})"
    return description


def error_location(error: BaseException) -> str | None:
    """Return `file:line, in function` of the innermost frame that is in no library.

    The frame that caught the exception does not count. None if there is no other frame.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.name != user_code.__name__
    ]
    inner_frames = [frame for frame in frames[1:] if not frame.filename.startswith("<frozen")]
    user_frames = [frame for frame in inner_frames if not frame.filename.startswith(_LIBRARIES)]
    candidates = user_frames or inner_frames
    if not candidates:
        return None
    frame = candidates[-1]
    return f"{frame.filename}:{frame.lineno}, in {frame.name}"


def load_plugin(
    key: str,
    name: str,
    options: Mapping[str, Any],
    *,
    methods: Mapping[str, Sequence[str]] | None = None,
) -> Any:
    """Import `package.module:Name` and call it with the options as keyword arguments.

    Options that name environment variables get their values here. Messages do not contain them.

    key: configuration key that holds the name, such as `reward.name`. The key of the options
    follows from it (`reward.options`).
    methods: methods that the result must have, with the arguments of their calls.

    Raises `PluginError` if the module cannot be imported or lacks the name, if the options do not
    fit the signature, if the call fails, or if a method is missing or takes other arguments.
    """
    target = _import_target(key, name)
    # A method of a protocol that a class inherits from, but does not define, is abstract
    for method in sorted(getattr(target, "__abstractmethods__", ())):
        raise PluginError(_missing_method(f"{key}={name}", method, methods or {}))
    options_key = f"{key.rpartition('.')[0]}.options"
    _check_options(options_key, name, target, options)
    plugin = _call(target, f"{key}={name}", options_key, name, options)
    for method, arguments in (methods or {}).items():
        with user_code(f"{key}={name}: `{method}`", propagate=(PluginError,)):
            if not hasattr(plugin, method):
                raise PluginError(_missing_method(f"{key}={name}", method, methods or {}))
            _check_method(f"{key}={name}: `{method}`", getattr(plugin, method), arguments)
    return plugin


def keep_variables(values: Any, texts: Any) -> Any:
    """Return resolved values with the texts that name environment variables left unresolved.

    values, texts: the same tree of dicts and lists, resolved and as it was written.
    """
    if isinstance(values, dict) and isinstance(texts, dict):
        return {key: keep_variables(value, texts.get(key)) for key, value in values.items()}
    if isinstance(values, list) and isinstance(texts, list):
        return [keep_variables(*pair) for pair in zip(values, texts, strict=True)]
    return texts if _has_variable(texts) else values


def _shows_values(error: BaseException, options: Mapping[str, Any] | None) -> bool:
    """Return True if the trace of an exception contains a value that messages leave out."""
    trace = "".join(traceback.format_exception(error))
    return hide_values(trace, options) != trace


def _missing_method(context: str, method: str, methods: Mapping[str, Sequence[str]]) -> str:
    return f"{context}: it has no method `{method}`. Define these methods: {', '.join(methods)}"


def missing_module(name: str) -> str | None:
    """Return why the module of `package.module:Name` cannot be found, or None. Imports nothing.

    Also returns None for a module inside nested packages without an `__init__.py`, because only an
    import can find these.
    """
    module = name.partition(":")[0]
    parts = module.split(".")
    try:
        spec = importlib.util.find_spec(parts[0])
        for depth in range(1, len(parts)):
            folders = spec and spec.submodule_search_locations
            if not folders:
                spec = None
            else:
                spec = PathFinder.find_spec(".".join(parts[: depth + 1]), list(folders))
    except (ImportError, KeyError, ValueError):
        return None
    return f"There is no module {module}" if spec is None else None


def _import_target(key: str, name: str) -> Any:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise PluginError(f"{key}={name}: a user-defined class is named package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise PluginError(
                f"{key}={name}: there is no module {error.name}. {PYTHONPATH_REMEDY}"
            ) from error
        raise PluginError(
            f"{key}={name}: {module_name} needs {error.name}, which is not installed"
        ) from error
    except (Exception, SystemExit) as error:  # user-defined code may raise anything
        raise PluginError(
            f"{key}={name}: importing {module_name} fails: {describe_error(error)}"
        ) from error
    try:
        return getattr(module, attribute)
    except AttributeError as error:
        raise PluginError(f"{key}={name}: {_missing_class(module, attribute)}") from error


def _missing_class(module: ModuleType, attribute: str) -> str:
    """Explain that a module has no such class, with a suggestion."""
    name = module.__name__
    if module.__spec__ is not None and module.__spec__.origin is None:
        folders = ", ".join(map(str, module.__path__))
        return (
            f"{name} is a folder without an __init__.py ({folders}), not a file. "
            f"Name a file in it: {name}.FILE:{attribute}"
        )
    classes = [
        class_name
        for class_name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == name
    ]
    return f"{module.__file__} has no class {attribute}.{_suggestion(attribute, classes)}"


def _check_options(key: str, name: str, target: Any, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # Some built-in classes have no signature. Calling them checks the options.
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    call = name + str(inspect.Signature(parameters))
    keywords = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [p.name for p in keywords]
    accepts_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if option not in names and not accepts_any:
            raise PluginError(
                f"{key}.{option}: {call} has no such option.{_suggestion(option, names)}"
            )
    for parameter in keywords:
        if parameter.default is parameter.empty and parameter.name not in options:
            raise PluginError(f"{key}.{parameter.name}: missing. {call} requires it")


def _call(target: Any, context: str, key: str, name: str, options: Mapping[str, Any]) -> Any:
    """Call the target. A TypeError or ValueError counts as a refusal of the options."""
    try:
        arguments = _resolve_variables(dict(options))
    except OmegaConfBaseException as error:
        first_line = str(error).partition("\n")[0]
        raise PluginError(f"{key}: {first_line}. Set the variable on every node") from error
    try:
        return _call_with(arguments, target, context, key, name, options)
    except PluginError as error:
        if not _shows_values(error, options):
            raise
        # The original exception contains the value, so it must not be shown as the cause.
        raise PluginError(hide_values(str(error), options)) from None


def _call_with(
    arguments: Mapping[str, Any],
    target: Any,
    context: str,
    key: str,
    name: str,
    options: Mapping[str, Any],
) -> Any:
    call = f"{name}({', '.join(f'{option}={value!r}' for option, value in options.items())})"
    try:
        propagate = (TypeError, ValueError)
        with user_code(f"{context}: {call}", propagate=propagate, options=options):
            return target(**arguments)
    except (TypeError, ValueError) as error:
        if isinstance(error, PluginError):
            raise
        location = error_location(error)
        suffix = f" ({location})" if location else ""
        raise PluginError(f"{key}: {call} refuses: {error}{suffix}") from error


def _check_method(context: str, method: Any, arguments: Sequence[str]) -> None:
    if not callable(method):
        raise PluginError(f"{context} is not a method but {type(method).__name__}. Define a method")
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return  # Some built-in methods have no signature. Calling them checks the arguments.
    try:
        signature.bind(*arguments)
    except TypeError as error:
        call = ", ".join(arguments)
        raise PluginError(
            f"{context} is called with ({call}), but its signature is {signature}: {error}. "
            f"Accept ({call})"
        ) from error


def _suggestion(name: str, names: Sequence[str]) -> str:
    matches = difflib.get_close_matches(name, names, n=1)
    return f" Did you mean {matches[0]}?" if matches else f" It has: {', '.join(names) or 'none'}"


def _has_variable(value: Any) -> bool:
    """Return True for a text that names an environment variable."""
    return isinstance(value, str) and _VARIABLE.search(value) is not None


def _resolve_variables(value: Any) -> Any:
    """Return options with the values of their environment variables.

    Raises OmegaConf's `InterpolationResolutionError` for a variable that is not set.
    """
    if isinstance(value, dict):
        return {key: _resolve_variables(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolve_variables(inner) for inner in value]
    if not _has_variable(value):
        return value
    return OmegaConf.create({"value": value})["value"]


def _variable_names(options: Any) -> list[str]:
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list):
        return [name for option in options for name in _variable_names(option)]
    return _VARIABLE.findall(options) if isinstance(options, str) else []
