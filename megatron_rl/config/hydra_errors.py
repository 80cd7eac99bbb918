"""Turns what Hydra and OmegaConf raise while composing into refusals.

Invariant: whatever a command line or a YAML file does wrong, the user sees a key, a value, a rule and a remedy, never a
traceback of a library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.errors import ConfigCompositionException, MissingConfigException, OverrideParseException
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationKeyError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.unknown_keys import unknown_key

_COMPOSE = "The command python launch/train_rl.py --cfg job shows what is composed"
_TYPES = (
    (re.compile(r"could not be converted to Integer"), "Must be a whole number"),
    (re.compile(r"could not be converted to Float"), "Must be a number"),
    (re.compile(r"is not a valid bool"), "Must be true or false"),
    (re.compile(r"is not a ListConfig, list or tuple"), "Must be a list, such as [a,b]"),
    (re.compile(r"is not Optional|not Optional"), "Must not be null"),
    (re.compile(r"not a subclass of"), "Must be a group of keys, not a value"),
    (re.compile(r"does not support deletion"), "Cannot be deleted: every key always exists"),
)


def as_refusal(error: Exception, overrides: Sequence[str]) -> Refusal:
    """The refusal of a configuration that could not be composed. overrides: the command line's, for their values."""
    cause = error.__cause__ or error
    override = _blamed_override(error, overrides)
    if isinstance(error, OverrideParseException):
        return Refusal(*_split(error.override), "Hydra cannot parse this", "Quote it for the shell: 'key=\"value\"'")
    if isinstance(error, MissingConfigException):
        return _missing_option(error, overrides)
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.full_key:
        key = str(cause.full_key)
        return unknown_key(key, _split(override)[1] if override else _where(error))
    if isinstance(cause, OmegaConfBaseException):
        return _wrong_value(error, cause, override, overrides)
    return _composition(error, overrides, override)


def _composition(error: Exception, overrides: Sequence[str], override: str | None) -> Refusal:
    twice = re.search(r"(\S+) appears more than once|Multiple values for (\S+?)\.", str(error))
    if twice is not None:
        group = twice[1] or twice[2]
        override = next((o for o in overrides if _split(o)[0] == group), group)
        return Refusal(*_split(override), "This group has a choice already", f"Replace it: {override.lstrip('+')}")
    groups = [o for o in overrides if "." not in _split(o)[0]]
    if override is None and len(groups) == 1:
        override = groups[0]
    key, value = _split(override) if override else ("configuration", "")
    return Refusal(key, value, _first_line(error), _COMPOSE)


def _missing_option(error: MissingConfigException, overrides: Sequence[str]) -> Refusal:
    group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    options = [name for name in error.options or () if not name.startswith("_")]
    rule = f"There is no such file in hydra_conf/{group}" if group else _first_line(error)
    key = group or next((_split(o)[0] for o in overrides if _split(o)[1] == option), "configuration")
    return Refusal(key, option, rule, f"Choose one of {', '.join(options)}" if options else _COMPOSE)


def _wrong_value(
    error: Exception, cause: OmegaConfBaseException, override: str | None, overrides: Sequence[str]
) -> Refusal:
    key = str(cause.full_key or "configuration")
    value = next((_split(o)[1] for o in overrides if _split(o)[0] == key), _where(error))
    if override:
        key, value = _split(override)
    text = _first_line(cause)
    rule = next((rule for pattern, rule in _TYPES if pattern.search(text)), text)
    remedy = "Give a value of that type" if isinstance(cause, ValidationError) else _COMPOSE
    if isinstance(cause, InterpolationResolutionError | InterpolationKeyError):
        remedy = "Name an existing key in ${...}, or quote it for the shell"
    return Refusal(key, value, rule, remedy)


def _blamed_override(error: Exception, overrides: Sequence[str]) -> str | None:
    if not isinstance(error, ConfigCompositionException):
        return None
    text = str(error)
    named = re.search(r"Error merging override (.+)", text) or re.search(r"Could not \w+ '(.+?)'", text)
    if named is None:
        return None
    return next((o for o in overrides if o == named[1] or _split(o)[0] == named[1]), named[1])


def _where(error: Exception) -> str:
    named = re.search(r"In '(.+?)'", str(error))
    return f"(in hydra_conf/{named[1]}.yaml)" if named else "?"


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+~"), value


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
