"""Limits that a single value must keep, declared beside the key they belong to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from megatron_rl.config.refusal import Refusal

_KEY = "limits"


@dataclass(frozen=True)
class Limits:
    """What one value must satisfy; None checks nothing. choices: the only values allowed."""

    choices: tuple[str, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None


def setting(
    default: Any,
    *,
    choices: tuple[str, ...] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """A dataclass field with a default and limits."""
    return field(default=default, metadata={_KEY: Limits(choices, ge, gt, le, lt)})


def check_limits(section: Any, prefix: str = "") -> Iterator[Refusal]:
    """Refusals of every value in a dataclass, nested ones included, that breaks a limit. None is always within."""
    for item in fields(section):
        key, value = f"{prefix}{item.name}", getattr(section, item.name)
        if is_dataclass(value):
            yield from check_limits(value, f"{key}.")
        elif value is not None:
            yield from _check_value(key, value, item.metadata.get(_KEY, Limits()), item.default)


def _check_value(key: str, value: Any, limits: Limits, default: Any) -> Iterator[Refusal]:
    if limits.choices and value not in limits.choices:
        yield Refusal(key, value, f"Must be one of {', '.join(limits.choices)}", "Choose one of these")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    broken = _broken_bound(value, limits)
    if broken is not None:
        remedy = f"Give such a number, or leave the key out for its default {default}" if default != "???" else ""
        yield Refusal(key, value, broken, remedy or "Give such a number")


def _broken_bound(value: float, limits: Limits) -> str | None:
    if not math.isfinite(value):
        return "Must be a finite number"
    if limits.ge is not None and value < limits.ge:
        return f"Must be at least {limits.ge:.12g}"
    if limits.gt is not None and value <= limits.gt:
        return f"Must be greater than {limits.gt:.12g}"
    if limits.le is not None and value > limits.le:
        return f"Must be at most {limits.le:.12g}"
    if limits.lt is not None and value >= limits.lt:
        return f"Must be less than {limits.lt:.12g}"
    return None
