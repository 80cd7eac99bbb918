"""Overrides of the command line, as Hydra's own parser reads them."""

from __future__ import annotations

import functools
from dataclasses import is_dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from megatron_rl.config.schema import Configuration, EvalSetSettings


def parse_override(text: str) -> Override | None:
    """Return one override such as `+group=option`; None where Hydra cannot parse it."""
    try:
        return _parser().parse_overrides([text])[0]
    except OverrideParseException:
        return None


def split_override(text: str) -> tuple[str, str]:
    """Return key and value of an override without the prefix +, ++ or ~, otherwise unchanged.

    The value is empty where there is none. Text that Hydra cannot parse is split at its first `=`.
    """
    key, _, value = text.partition("=")
    override = parse_override(text)
    if override is None:
        return key.lstrip("+~"), value
    if override.package is None:
        return override.key_or_group, value
    return f"{override.key_or_group}@{override.package}", value


def quote_text(text: str) -> str:
    """Return an override whose value Hydra reads as the text that was typed, where text is wanted.

    Without quotes run.name=2026_11_21 would be the number 20261121.
    """
    override = parse_override(text)
    if override is None or override.is_sweep_override():
        return text
    if not _is_text(override.key_or_group) or not isinstance(override.value(), bool | int | float):
        return text
    value = override.get_value_string()
    return f"{text.removesuffix(value)}'{value.strip()}'"


def _is_text(key: str) -> bool:
    """Return whether a key takes text. A set of eval.sets may be given by its path alone."""
    kinds: list[Any] = [Configuration]
    for name in key.split("."):
        kinds = [inner for kind in kinds for inner in _inner_kinds(kind, name)]
    return str in kinds or EvalSetSettings in kinds


@functools.cache
def _inner_kinds(kind: Any, name: str) -> tuple[Any, ...]:
    """Return the types that a key of a section or of a dictionary may have, none if there is no
    such key.
    """
    if get_origin(kind) is dict:
        inner = get_args(kind)[1]
    else:
        inner = get_type_hints(kind).get(name) if is_dataclass(kind) else None
    is_union = get_origin(inner) in (Union, UnionType)
    return get_args(inner) if is_union else (inner,)


@functools.cache
def _parser() -> OverridesParser:
    return OverridesParser.create()
