"""Finding the final answer in a response, and telling whether two answers are the same."""

from __future__ import annotations

import re

# Sign only where it cannot be a subtraction; commas only where they separate thousands. No
# exponents: in `e17` the 17 is the number. A dot before the digits is decimal where it cannot end a
# sentence or a section's number.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}])-)?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.)\]}])\.[0-9]+)"
)
# What makes the digits after it a part of a longer number: an exponent, a fraction, a separator, a
# minus sign that `_NUMBER` takes for a subtraction (or that is no ASCII hyphen). Nothing is joined
# across lines.
_JOINT = re.compile(
    r"(?:[0-9]\.?[eE][+-]?|[0-9][.,:^'’_]|[0-9)\]}][^\S\n]*[/⁄][^\S\n]*|\}\{|[-−–][^\S\n]*)\Z"
)
_THOUSANDS_BEFORE = re.compile(r"(?<![0-9])[0-9]{1,3}[^\S\n]\Z")
_JOINT_LENGTH = 16  # characters before a number that are looked at
_BOX = "\\boxed{"


def last_number(text: str) -> str | None:
    """The last number of a text as written, or None."""
    match = _last_match(text)
    return match.group() if match else None


def misread_number(text: str) -> str | None:
    """The last number if it is only a part of what is written there: `5` of `1e5`, `2` of `1/2`,
    `000` of `1 000`.

    Nobody can say what the writer of a reference meant by these, so a reference must not hold one.
    """
    match = _last_match(text)
    if match is None:
        return None
    before, after = (
        text[max(0, match.start() - _JOINT_LENGTH) : match.start()],
        text[match.end() : match.end() + 1],
    )
    grouped = re.match(r"[0-9]{3}(?![0-9])", match.group()) and _THOUSANDS_BEFORE.search(before)
    # `isnumeric` without ASCII: superscripts, vulgar fractions and other scripts' digits, which are
    # text to `_NUMBER`.
    foreign = after.isnumeric() or (before[-1:].isnumeric() and not before[-1:].isascii())
    return match.group() if grouped or foreign or _JOINT.search(before) else None


def _last_match(text: str) -> re.Match[str] | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return last


def last_line(text: str) -> str | None:
    """The last line with anything on it, without white space at its ends, or None."""
    stripped = text.rstrip()
    return stripped[stripped.rfind("\n") + 1 :].strip() or None


def boxed(text: str) -> str | None:
    r"""The contents of the last `\boxed{...}`, or None when there is none or its braces do not
    close.
    """
    start = text.rfind(_BOX)
    if start < 0:
        return None
    start += len(_BOX)
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)  # an escaped brace is neither
        if depth == 0:
            return text[start : start + match.start()].strip() or None
    return None


def canonical(answer: str) -> str:
    """What two answers are compared by: numbers by value, everything else by its text without white
    space.

    `0,170,151.0`, `170151` and `+170151` are one number; `-0` is `0`. Values are compared as digit
    strings: no rounding, and no conversion of huge numbers, which is quadratic.
    """
    text = "".join(answer.split()).removeprefix("$").removesuffix("$")
    if _NUMBER.fullmatch(text.removeprefix("+")) is None:
        return text
    number = text.removeprefix("+").replace(",", "")
    negative = number.startswith("-")
    whole, _, fraction = number.removeprefix("-").partition(".")
    whole, fraction = whole.lstrip("0") or "0", fraction.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if negative and value != "0" else value
