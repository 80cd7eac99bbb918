"""Finds the final answer in a response, and compares answers."""

from __future__ import annotations

import re

# A number. A minus sign (an ASCII hyphen or U+2212) belongs to it only where it cannot be a
# subtraction, and commas only where they separate thousands. Exponents do not: in `e17` the number
# is 17. A dot before the digits is a decimal point where it cannot end a sentence or a section's
# number.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}])[-\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z.)\]}])\.[0-9]+)"
)
# Text after which digits are part of a longer number: an exponent, a fraction, a separator, or a
# minus sign that `_NUMBER` takes for a subtraction, or another dash. Numbers do not continue across
# lines.
_CONTINUATION = re.compile(
    r"(?:[0-9]\.?[eE][+-]?|[0-9][.,:^'’_]|[0-9)\]}][^\S\n]*[/⁄][^\S\n]*|\}\{|[-−–][^\S\n]*)\Z"
)
_THOUSANDS = re.compile(r"(?<![0-9])[0-9]{1,3}[^\S\n]\Z")
_CONTEXT_LENGTH = 16  # number of characters before a number that are checked
_BOX = "\\boxed{"


def last_number(text: str) -> str | None:
    """Return the last number in a text as written, or None."""
    match = _last_match(text)
    return match.group() if match else None


def partial_number(text: str) -> str | None:
    """Return the last number if it is only part of a longer one, or None.

    Examples: `5` of `1e5`, `2` of `1/2` and `000` of `1 000`. Such a reference answer is ambiguous
    and must be refused. Such a response has no answer.
    """
    match = _last_match(text)
    if match is None:
        return None
    before = text[max(0, match.start() - _CONTEXT_LENGTH) : match.start()]
    previous_character = before[-1:]
    next_character = text[match.end() : match.end() + 1]
    starts_with_group = re.match(r"[0-9]{3}(?![0-9])", match.group()) is not None
    follows_thousands = starts_with_group and _THOUSANDS.search(before) is not None
    # Superscripts, vulgar fractions and digits of other scripts are numeric characters that
    # `_NUMBER` does not read.
    touches_numeric = next_character.isnumeric() or (
        previous_character.isnumeric() and not previous_character.isascii()
    )
    continues = _CONTINUATION.search(before) is not None
    return match.group() if follows_thousands or touches_numeric or continues else None


def _last_match(text: str) -> re.Match[str] | None:
    last = None
    for match in _NUMBER.finditer(text):
        last = match
    return last


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

    `0,170,151.0`, `170151` and `+170151` are one number, and `-0` is `0`. Values remain digit
    strings, because a conversion would round, and takes quadratic time for huge numbers.
    """
    text = "".join(answer.split()).removeprefix("$").removesuffix("$")
    if _NUMBER.fullmatch(text.removeprefix("+")) is None:
        return text
    number = text.removeprefix("+").replace(",", "").replace("\u2212", "-")
    negative = number.startswith("-")
    digits, _, decimals = number.removeprefix("-").partition(".")
    whole = digits.lstrip("0") or "0"
    fraction = decimals.rstrip("0")
    value = f"{whole}.{fraction}" if fraction else whole
    return f"-{value}" if negative and value != "0" else value
