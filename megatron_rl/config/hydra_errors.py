"""Refusals of arguments that Hydra must not get, and of what it cannot compose."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
)

from megatron_rl.config.keys import SECTIONS, declared_keys, similar_keys, unknown_key
from megatron_rl.config.overrides import parse_override, split_override
from megatron_rl.contracts.paths import missing_directory
from megatron_rl.contracts.refusal import Refusal

_INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
# Hydra's options that show something without a run, with the words that may follow each.
_QUESTIONS: dict[str, tuple[str, ...]] = {
    "--help": (),
    "-h": (),
    "--hydra-help": (),
    "--version": (),
    "--resolve": (),
    "--cfg": ("job",),
    "-c": ("job",),
    "--info": _INFO_TOPICS,
    "-i": _INFO_TOPICS,
}
_SEARCH_PATH = "hydra.searchpath"
_COMPOSE_REMEDY = "The command python launch/train_rl.py --cfg job shows what is composed"


def overrides_of(arguments: Sequence[str]) -> list[str]:
    """Return the arguments without Hydra's options and the words that belong to them."""
    previous_arguments = ["", *arguments]
    return [
        text
        for previous, text in zip(previous_arguments, arguments, strict=False)
        if not text.startswith("-") and text not in _QUESTIONS.get(previous, ())
    ]


def forbidden_arguments(arguments: Sequence[str]) -> Iterator[Refusal]:
    """Yield a refusal for each argument that a run cannot take.

    These are Hydra's options except its questions, its own settings except the search path of
    user-defined files, deletions of keys, and sweeps.
    """
    for text, following in zip(arguments, [*arguments[1:], ""], strict=False):
        if text.startswith("-"):
            yield from _option_refusals(text, following)
    for text in overrides_of(arguments):
        override = parse_override(text)
        if override is not None:
            yield from _override_refusals(text, override)


def unparsable_overrides(overrides: Sequence[str]) -> Iterator[Refusal]:
    """Yield a refusal for each override that Hydra cannot parse.

    A setting with spaces around its `=` is several arguments, and one refusal.
    """
    before = ["", *overrides]
    after = [*overrides[1:], "", ""]
    for place, text in enumerate(overrides):
        if before[place].endswith("=") and _is_word(text):
            continue
        if text.startswith("="):
            if not _is_word(before[place]):
                yield _missing_key(text[1:])
        elif text.endswith("=") and _is_word(after[place]):
            yield _space_refusal(text[:-1], after[place])
        elif _is_word(text) and after[place].startswith("="):
            yield _space_refusal(text, after[place][1:] or after[place + 1])
        elif parse_override(text) is None:
            yield _unparsable(text)


def repeated_settings(overrides: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each setting that has several values: the last one counts.

    It is no mistake: scripts append the settings of their users to their own. But a later one with
    a + is refused.
    """
    values: dict[str, list[str]] = {}
    refused_keys = set()
    for text in overrides:
        key, value = split_override(text)
        override = parse_override(text)
        if key in values and override is not None and override.is_add():
            refused_keys.add(key)
        if value not in values.setdefault(key, []):
            values[key].append(value)
    for key, different_values in values.items():
        if len(different_values) > 1 and key not in refused_keys:
            yield f"{key} is given as {' and as '.join(different_values)}: the last value counts"


def _option_refusals(text: str, following: str) -> Iterator[Refusal]:
    """following: the next argument, which may be the option's value."""
    option, _, value = text.partition("=")
    if option not in _QUESTIONS:
        name = option.lstrip("-").replace("-", "_")
        keys = [name] if name in declared_keys() else similar_keys(name)
        if keys:
            value = value or (following if _is_word(following) else "")
            settings = [f"{key}={value or 'VALUE'}" for key in keys]
            rule = "A setting is key=value, without dashes"
            yield Refusal(option, value, rule, f"Write {' or '.join(settings)}")
            return
        rule = (
            "One torchrun starts one run, which takes key=value and Hydra's questions --help, "
            "--cfg and --info"
        )
        remedy = (
            "Write settings without dashes: --cfg job prints all keys. Loop in the shell. For your "
            f"own files use {_SEARCH_PATH}=[file://DIR]"
        )
        yield Refusal(option, value, rule, remedy)
    elif option in ("--cfg", "-c") and (value or following) != "job":
        rule = "This option shows the configuration of a job"
        yield Refusal(option, value or following, rule, "Write --cfg job")


def _is_word(text: str) -> bool:
    """True for an argument that is neither an option nor a setting."""
    return bool(text) and not text.startswith("-") and "=" not in text


def _space_refusal(key: str, value: str) -> Refusal:
    return Refusal(key, value, "A setting is key=value, without spaces", f"Write {key}={value}")


def _missing_key(value: str) -> Refusal:
    rule = "A setting is key=value, and the key before its = is missing"
    return Refusal("", value, rule, f"Write KEY={value or 'VALUE'}, without spaces")


def _override_refusals(text: str, override: Override) -> Iterator[Refusal]:
    key, value = split_override(text)
    if key == _SEARCH_PATH:
        if missing := missing_directory(value):
            remedy = f"Write {_SEARCH_PATH}=[file:///DIRECTORY]"
            yield Refusal(key, value, f"There is no directory {missing}", remedy)
    elif override.is_hydra_override() or override.key_or_group == "hydra":
        rule = "Hydra's own settings are fixed, because one torchrun starts one run"
        remedy = "Use run.root and run.name for the directory. Loop in the shell for several runs"
        yield Refusal(key, value, rule, remedy)
    elif override.is_delete() and key in declared_keys():
        remedy = f"Leave out ~{key}, and set what should differ"
        yield Refusal(key, value, "No key can be deleted: every key always exists", remedy)
    elif override.is_sweep_override():
        remedy = f"Quote it for the shell: '{key}=\"{value}\"'"
        yield Refusal(key, value, "Hydra reads several values, and a run takes one", remedy)


def _unparsable(text: str) -> Refusal:
    key, value = split_override(text)
    if "=" not in text:
        return Refusal(key, value, "A setting is key=value, without spaces", f"Write {key}=...")
    example = f"'{key}=\"{value}\"'"
    if value.startswith("["):
        items = ",".join(f"'{item.strip()}'" for item in value.strip("[]").split(","))
        example = f'"{key}=[{items}]"'
    return Refusal(
        key, value, "Hydra cannot parse this value", f"Quote it for the shell: {example}"
    )


def composition_refusal(
    error: Exception, overrides: Sequence[str], compose: Callable[[Sequence[str]], object]
) -> Refusal:
    """Return the refusal of overrides that Hydra cannot compose.

    error: raised by compose(overrides). Composing fewer of the overrides again shows which of them
    causes the error.
    """
    if isinstance(error, MissingConfigException):
        return _missing_file(error, overrides)
    text = _failing_override(error, overrides, compose)
    key, value = split_override(text) if text else ("configuration", "?")
    cause = error.__cause__ or error
    if isinstance(cause, ConfigKeyError | ConfigAttributeError):
        return unknown_key(key, value)
    if isinstance(cause, yaml.YAMLError):
        rule = f"A file is not YAML: {' '.join(str(cause).split())}"
        return Refusal(key, value, rule, "Correct the file")
    override = parse_override(text) if text else None
    if override is not None and override.is_add() and _has_value_already(key, error):
        return _repeated_key(key, value)
    if override is not None and type(error) is ValueError:
        rule = "A group needs the name of one of its options"
        return Refusal(key, value, rule, "Choose one that --help lists")
    return Refusal(key, value, _first_line(cause), _COMPOSE_REMEDY)


def _failing_override(
    error: Exception, overrides: Sequence[str], compose: Callable[[Sequence[str]], object]
) -> str | None:
    """Return the override with which the error first appears; None if it appears without any."""
    search_paths = [text for text in overrides if split_override(text)[0] == _SEARCH_PATH]
    others = [text for text in overrides if text not in search_paths]
    for count in range(len(others) + 1):
        try:
            compose([*search_paths, *others[:count]])
        except Exception as repeated_error:
            if _is_same(repeated_error, error):
                return others[count - 1] if count else None
    return None


def _is_same(error: Exception, other: Exception) -> bool:
    return type(error) is type(other) and str(error) == str(other)


def _missing_file(error: MissingConfigException, overrides: Sequence[str]) -> Refusal:
    """Return the refusal of an option of a group, such as algo=ppo, that has no file."""
    path = (error.missing_cfg_file or "").removesuffix(".yaml")
    group, _, option = path.rpartition("/")
    key = group
    if not group:
        values = dict(map(split_override, overrides))
        key = next((key for key, value in values.items() if value == option), "configuration")
    place = f"hydra_conf/{group}" if group else "hydra_conf"
    options = error.options
    remedy = f"Choose one of {', '.join(options)}" if options else _COMPOSE_REMEDY
    return Refusal(key, option, f"There is no such file in {place}", remedy)


def _has_value_already(key: str, error: Exception) -> bool:
    """Return whether an override with + fails because the key has a value. Options declare none."""
    return key in (*declared_keys(), "experiment") or f"already at '{key}'" in str(error)


def _repeated_key(key: str, value: str) -> Refusal:
    """Return the refusal of a + in front of a key, or of a group, that has a value without it."""
    if key in SECTIONS or key == "experiment":
        remedy = f"Replace it, without the +: {key}={value}"
        return Refusal(key, value, "This group has a choice already", remedy)
    remedy = f"Write it without the +: {key}={value}"
    return Refusal(key, value, "This key has a value already", remedy)


def resolution_refusal(error: OmegaConfBaseException, overrides: Sequence[str]) -> Refusal:
    """Return the refusal of a composed tree whose interpolations, such as ${key}, have no value."""
    key = str(error.full_key or "configuration")
    value = dict(map(split_override, overrides)).get(key, "?")
    remedy = _COMPOSE_REMEDY
    if isinstance(error, InterpolationResolutionError | GrammarParseError):
        remedy = "Name an existing key in ${...}, or quote it for the shell"
    if "Environment variable" in str(error):
        remedy = "Set the variable on every node"
    return Refusal(key, value, _first_line(error), remedy)


def _first_line(error: BaseException) -> str:
    """Return the first line of a library's own message."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
