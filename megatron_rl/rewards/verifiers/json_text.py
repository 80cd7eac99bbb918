"""Reads JSON text of a model or a row within limits of size, depth and digits."""

from __future__ import annotations

import json
import math
import re
from typing import Any

MAX_CHARACTERS = 65_536
_MAX_DEPTH = 32
_MAX_VALUES = 2000
_MAX_DIGITS = 300
_STRING = re.compile(r'"(?:[^"\\]|\\.)*+"?', re.DOTALL)
_FENCE = re.compile(r"\s*```\s*(\w*)\s*")


def read_json(text: str) -> Any:
    """Parse JSON text.

    Raises ValueError if it is no JSON, is beyond a limit, has a key twice in an object, or has a
    number that is not finite.
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text)} characters, at most {MAX_CHARACTERS}")
    _check_structure(_STRING.sub('""', text))
    return json.loads(
        text,
        object_pairs_hook=_read_pairs,
        parse_constant=_refuse,
        parse_float=_read_float,
        parse_int=_read_int,
    )


def last_json(text: str) -> str:
    """Return the last fenced block of JSON in a response, or the whole text without one."""
    lines = text.split("\n")
    block = None
    start = None
    for number, line in enumerate(lines):
        fence = _FENCE.fullmatch(line)
        if fence is None:
            continue
        if start is not None:
            block = (start, number)
            start = None
        elif fence[1].lower() in ("", "json"):
            start = number + 1
    return text if block is None else "\n".join(lines[slice(*block)])


def _check_structure(text: str) -> None:
    """Raise ValueError for too many values or brackets within brackets. text: without strings."""
    depth = deepest = 0
    for match in re.finditer(r"[\[\]{}]", text):
        depth += 1 if match.group() in "[{" else -1
        deepest = max(deepest, depth)
    if deepest > _MAX_DEPTH:
        raise ValueError(f"{deepest} brackets within each other, at most {_MAX_DEPTH}")
    num_values = text.count(",") + text.count("[") + text.count("{")
    if num_values > _MAX_VALUES:
        raise ValueError(f"{num_values} values, at most {_MAX_VALUES}")


def _read_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("an object has a key twice")
    return values


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _read_float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def _read_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(text)} digits, at most {_MAX_DIGITS}")
    return int(text)
