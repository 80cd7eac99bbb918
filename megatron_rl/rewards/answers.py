"""Finds the final answer in a response, and compares answers."""

from __future__ import annotations

import re

from megatron_rl.rewards.numbers import NUMBER, SEPARATOR, is_whole, last_match, stands_alone

_BOX = "\\boxed{"
_SIGN = re.compile(r"^([-+\u2212]) ")
_OTHER_SPACE = re.compile(r"(?<![0-9]) | (?![0-9])")  # not between two digits


def last_number(text: str) -> str | None:
    """Return the last number in a text as written, or None if it is a part of something longer.

    Examples of parts: `5` of `1e5`, `2` of `1/2` or `x^2`, `000` of `1 000`, `4` of `(3, 4)`.
    """
    match = last_match(text)
    return match.group() if match is not None and is_whole(match) else None


def partial_number(text: str) -> str | None:
    """Return the last number if it is only a part of something longer, or None."""
    match = last_match(text)
    return None if match is None or is_whole(match) else match.group()


def is_ambiguous(text: str) -> bool:
    """Return True if the last number shares its statement with others, or touches a letter."""
    match = last_match(text)
    return match is not None and not stands_alone(match)


def last_line(text: str) -> str | None:
    """Return the last non-empty line without white space around it, or None."""
    lines = text.rstrip()
    return lines[lines.rfind("\n") + 1 :].strip() or None


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last `\boxed{...}`, or None if it is missing or not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)  # an escaped brace does not count
        if depth == 0:
            return text[start : start + match.start()].strip() or None
    return None


def canonical(answer: str) -> str:
    """Return an answer in a form to compare: a number by value, other text without white space.

    `0,170,151.0`, `170151`, `+170151` and LaTeX's `170{,}151` are one number, and `-0` is `0`.
    White space that separates numbers stays: `1 2`, `1, 234` and `2 3/4` are not 12, 1234 and 23/4.
    Values remain digit strings, because a conversion would round, and takes quadratic time for
    huge numbers.
    """
    spaced_text = _SIGN.sub(r"\1", " ".join(answer.split()).strip("$ "))
    if NUMBER.fullmatch(spaced_text.removeprefix("+")) is None:
        text = _OTHER_SPACE.sub("", spaced_text)
        joins_numbers = NUMBER.fullmatch(text.removeprefix("+")) is not None
        return spaced_text if joins_numbers else text
    number = SEPARATOR.sub("", spaced_text.removeprefix("+")).replace("\u2212", "-")
    negative = number.startswith("-")
    digits, _, decimals = number.removeprefix("-").partition(".")
    whole = digits.lstrip("0") or "0"
    fraction = decimals.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if negative and value != "0" else value
