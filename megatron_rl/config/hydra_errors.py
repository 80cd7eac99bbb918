"""Turns what Hydra and OmegaConf raise while composing into refusals."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hydra.errors import MissingConfigException, OverrideParseException

from megatron_rl.config.refusal import Refusal
from megatron_rl.config.unknown_keys import unknown_key

_COMPOSE = "The command python launch/train_rl.py --cfg job shows what is composed"
_GIVE_TYPE = "Give a value of that type"
# What the libraries say | the rule | the remedy
_KNOWN = (
    (r"could not be converted to Integer", "Must be a whole number", _GIVE_TYPE),
    (r"could not be converted to Float", "Must be a number", _GIVE_TYPE),
    (r"is not a valid bool", "Must be true or false", _GIVE_TYPE),
    (r"is not a ListConfig, list or tuple", "Must be a list, such as [a,b]", _GIVE_TYPE),
    (r"not a subclass of", "Must be a group of keys, not a value", _GIVE_TYPE),
    (r"not Optional", "Must not be null", _GIVE_TYPE),
    (r"does not support deletion", "Cannot be deleted: every key always exists", _COMPOSE),
    (r"[Ii]nterpolation", None, "Name an existing key in ${...}, or quote it for the shell"),
    (r"appears more than once|Multiple values for", "This group has a choice already", "Replace it, without the +"),
)


@dataclass(frozen=True)
class Override:
    """One `key=value` of the command line, its prefix +, ++ or ~ taken off."""

    key: str
    value: str

    @classmethod
    def parse(cls, text: str) -> Override:
        key, _, value = text.partition("=")
        return cls(key.lstrip("+~"), value)


def as_refusal(error: Exception, overrides: Sequence[str]) -> Refusal:
    """The refusal of a configuration that could not be composed. overrides: the command line's, for their values."""
    given = [Override.parse(text) for text in overrides]
    if isinstance(error, OverrideParseException):
        blamed = Override.parse(error.override)
        example = "\"key=['a','b']\"" if blamed.value.startswith("[") else "'key=\"value\"'"
        return Refusal(blamed.key, blamed.value, "Hydra cannot parse this", f"Quote it for the shell: {example}")
    if isinstance(error, MissingConfigException):
        return _missing_option(error, given)
    place = re.match(r"In '(.+?)': \w+ raised while composing config:\n", str(error))
    text = str(error.__cause__ or error)[place.end() if place else 0 :]
    blamed = _blame(str(error), text, given, place[1] if place else None)
    if re.match(r"Key '.+?' (is )?not in ", text):
        return unknown_key(blamed.key, blamed.value)
    first_line = text.strip().splitlines()[0] if text.strip() else type(error).__name__
    rule, remedy = next(((r, m) for pattern, r, m in _KNOWN if re.search(pattern, text)), (None, _COMPOSE))
    if type(error).__module__.startswith("yaml"):
        rule, remedy = f"A file is not YAML: {' '.join(text.split())}", "Correct it there"
    return Refusal(blamed.key, blamed.value, rule or first_line, remedy)


def _missing_option(error: MissingConfigException, given: Sequence[Override]) -> Refusal:
    group, _, option = (error.missing_cfg_file or "").removesuffix(".yaml").rpartition("/")
    options = [name for name in error.options or () if not name.startswith("_")]
    rule = f"There is no such file in hydra_conf/{group}" if group else "There is no such file in hydra_conf"
    key = group or next((o.key for o in given if o.value == option), "configuration")
    return Refusal(key, option, rule, f"Choose one of {', '.join(options)}" if options else _COMPOSE)


def _blame(message: str, text: str, given: Sequence[Override], file: str | None) -> Override:
    """The key that is wrong, and its value or the file that sets it."""
    whole = re.search(r"Error merging override (.+)", message)
    if whole is not None:
        return Override.parse(whole[1])
    named = re.search(r"full_key: (\S+)", text) or re.search(r"Could not \w+ '(.+?)'", message)
    named = (
        named or re.search(r"(\S+) appears more than once", text) or re.search(r"Multiple values for (\S+?)\.", text)
    )
    if named is not None:
        value = next((o.value for o in given if o.key == named[1] or o.key.startswith(f"{named[1]}.")), None)
        return Override(named[1], value if value is not None else f"(in {file}.yaml)" if file else "?")
    groups = [override for override in given if "." not in override.key]
    return groups[0] if len(groups) == 1 else Override("configuration", "?")
