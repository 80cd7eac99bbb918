r"""Finds the last number in a text, and tells whether it is a whole one.

A number is whole if only known decoration is around it: words, punctuation, quotes, Markdown, a
currency, a percent sign, a unit, `$...$` or `\boxed{...}`. `10` in `2^{10}` is a part of an
expression, `4` in `(3, 4)` is one of several values, and `3` in `3 million` is a part of a number.
"""

from __future__ import annotations

import re
import unicodedata

# A separator of thousands, plain or as LaTeX writes it
SEPARATOR = re.compile(r",\\!|\{,\}|,")
# A number. A minus sign (an ASCII hyphen or U+2212) belongs to it only where it cannot be a
# subtraction, and commas only where they separate thousands. A dot before the digits is a decimal
# point where it cannot end a sentence or a section's number.
NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z)\]}])[-\u2212])?"
    rf"(?:(?:[0-9]{{1,3}}(?:(?:{SEPARATOR.pattern})[0-9]{{3}})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?"
    r"|(?<![0-9A-Za-z.)\]}])\.[0-9]+)"
)
_CONTEXT_LENGTH = 200  # number of characters around a number that are checked

_LETTER = "A-Za-z\u0370-\u03ff"
_OPERAND = rf"0-9{_LETTER})\]}}"
_STYLE = r"\\(?:boxed|fbox|text|textbf|textit|mathrm|mathbf|mathit|mbox|underline|boldsymbol)\s*"
_TEXT = rf"{_STYLE}\{{[^{{}}]*\}}"
_GAP = r"[^\S\n]|\\[,;:! ]|~|\\q?quad(?![A-Za-z])"
# Decoration before a number. A bracket, asterisk or plus sign after an operand is none.
_BEFORE = re.compile(
    rf"(?:{_GAP}|{_TEXT}|{_STYLE}\{{|[\"'\u201c\u2018`#]|(?<![0-9])\\?[$\xa3\u20ac\xa5\u20b9]"
    rf"|(?<![{_OPERAND}*])\*+|(?<![{_OPERAND}_])_+|(?<![{_OPERAND}])\+"
    rf"|\\[(\[]|\\left[(\[]|(?<![{_OPERAND}^_.\\])[(\[{{])*\Z"
)
# Decoration after a number
_AFTER = re.compile(
    rf"(?:[^\S\n]*{_TEXT}|[\"'\u201d\u2019`$)\]}}%\xb0*_]|\\[$)\]}}%]|\\right[)\].]"
    r"|\^\{?\\circ\}?|\^\xb0|\\degree(?![A-Za-z])|\\[,;:! ]|~)*"
)
# Operators, before which or after which no number ends. A colon and `>` are not among them.
_OPERATORS = frozenset(
    "+-\u2212\u2013*\xd7\xf7\xb7\u22c5\u2219\u2217/\u2044^_\xb1\u2213\u221a<&({[\\"
)
_COMPARISONS = ("<=", ">=", "!=", "\u2264", "\u2265", "\u2260", "\u221b", "\u221c")
# Commands of LaTeX next to which a number is whole
_COMMAND = re.compile(
    r"[^\S\n]*\\(?:approx|to|implies|iff|Rightarrow|rightarrow|longrightarrow|Longrightarrow"
    r"|therefore|because|displaystyle|equiv|cong|sim|simeq|end|quad|qquad)(?![A-Za-z])"
)
# A letter that touches a number is no factor of it: factors stand behind numbers
_NAME = re.compile(rf"(?<![{_OPERAND}^_\\])[A-Za-z]\Z")
_CURRENCY = re.compile("US|CA|AU|HK|USD|EUR|GBP|INR|CNY|RMB|CAD|AUD|Rs|RM")
# Words next to which a number is a part of another one
_WORD_BEFORE = re.compile(
    "minus|negative|plus|times|over|sqrt|log|ln|sin|cos|tan|exp|mod", re.IGNORECASE
)
_WORDS_AFTER = re.compile(
    r"[^\S\n]*-?(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial|half"
    r"|halves|thirds?|quarters?|fourths?|fifths?|tenths?|plus|minus)\b",
    re.IGNORECASE,
)
# Units and endings that touch a number. Other letters could be variables: `2x`.
_UNIT = re.compile(
    "mm|cm|dm|km|nm|kg|mg|ml|cl|mL|kL|kW|kWh|Hz|kHz|MHz|GHz|kB|MB|GB|TB|hrs|hr|min|sec|ms|mph|kmh"
    "|ft|in|lb|lbs|oz|am|pm|AM|PM|st|nd|rd|th|USD|EUR|GBP"
)
# Several values: `1, 2`, `3 and 4`, `x = 3, y = 4`, `2 hours 30 minutes`
_CONJUNCTION = (
    r"(?:[^\S\n]*[,;]|,?[^\S\n]+(?:and|or|to)(?=[^\S\n])"
    r"|[^\S\n]*\\text\{\W*(?:and|or|to)\W*\})"
)
_SEVERAL = re.compile(
    rf"[0-9][)\]}}%$]*{_CONJUNCTION}(?:[\s$\"'*]|\\[,;:! (\[])*[-\u2212]?\Z"
    rf"|=[^\S\n]*[-\u2212]?[0-9.]+[$)]*{_CONJUNCTION}[\s$]*(?:\\[,;:! ]|\\q?quad|and\b)*[\s$]*"
    r"[A-Za-z](?:_\w)?[^\S\n]*=[\s$]*\Z"
    r"|[0-9][^\S\n]*(?:h|hrs?|hours?|min|minutes?|days?|weeks?|months?|years?|ft|feet|foot|yards?"
    r"|pounds?|lbs?|dollars?|euros?|degrees?|\xb0)[^\S\n]+(?:and[^\S\n]+)?\Z"
    r"|[0-9][^\S\n]*[xX][^\S\n]*\Z|[0-9][^\S\n]+:[^\S\n]*\Z|[^\S\n]%[^\S\n]*\Z"
)
# Text after which digits are part of a longer number: an exponent, a separator
_CONTINUATION = re.compile(r"(?:[0-9]\.?[eE][+-]?|[0-9][.,:^'\u2019_])\Z")
_THOUSANDS = re.compile(r"(?<![0-9])[0-9]{1,3}[^\S\n]\Z")
_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
# What follows one of several values in brackets: `4, x)`. `++`: a command is read in one way alone.
_FURTHER_VALUES = re.compile(
    r"[^\S\n]*[,;](?:\\[A-Za-z]++|[A-Za-z](?![A-Za-z])|\\[^A-Za-z)\]}]|[^A-Za-z\\)\]}])*\\?[)\]}]"
)
_EXPRESSION = re.compile(
    rf"[({{\[^]|[{_LETTER}]|[^\S\n]*[-\u2212\u2013+*\xd7\xf7\xb7\u22c5\u2219\u2217/\u2044<>\u2264"
    rf"\u2265\xb1=][^\S\n]*(?:[{_LETTER}](?![A-Za-z])|[({{\[\u221a]|\\[A-Za-z])"
    r"|[^\S\n]*[\u221a\xd7\xf7\xb1\u2264\u2265\u2260]|[^\S\n]*[<>]=|[^\S\n]+<[^\S\n]"
    r"|[^\S\n]+[inxyz\u0370-\u03ff](?![A-Za-z'])"
)
# Text before the part of a reference that holds its number
_MARKER = re.compile(r"####|=|:|>|\\boxed|\bis\b|[.!?][^\S\n]|[\u3002\uff1a\u662f\u4e3a]")


def last_match(text: str) -> re.Match[str] | None:
    """Return the last number in a text, whole or not, or None."""
    last = None
    for match in NUMBER.finditer(text):
        last = match
    return last


def is_whole(match: re.Match[str]) -> bool:
    """Return True if a number in a text is no part of an expression or of a longer number.

    Only the line of the number counts: numbers do not continue across lines.
    """
    text = match.string
    before = text[max(0, match.start() - _CONTEXT_LENGTH) : match.start()].rpartition("\n")[2]
    after = text[match.end() : match.end() + _CONTEXT_LENGTH].partition("\n")[0]
    opening = _open_bracket(before)
    return (
        _ends_before(before, match.group())
        and _ends_after(before, match.group(), after)
        and (opening is None or _is_alone_in_brackets(before, opening, after))
    )


def stands_alone(match: re.Match[str]) -> bool:
    """Return True if a number is the only one of its statement, and touches no letter.

    A statement begins after `####`, `=`, `:` or `is`.
    """
    line = match.string[: match.start()].rpartition("\n")[2]
    start = 0
    for marker in _MARKER.finditer(line):
        start = marker.end()
    statement = line[start:]
    return not any(character.isnumeric() for character in statement) and not _NAME.search(statement)


def _ends_before(before: str, number: str) -> bool:
    """Return True if the text before a number is not of the same expression."""
    if _CONTINUATION.search(before) or _SEVERAL.search(before):
        return False
    if _NAME.search(before):
        return True
    decoration = _BEFORE.search(before)
    assert decoration is not None  # it may be empty
    outer = before[: decoration.start()]
    command = re.search(r"\\[A-Za-z]+\Z", outer)
    if command is not None:
        return _COMMAND.fullmatch(command.group()) is not None
    word = re.search(rf"[{_LETTER}]{{2,}}\Z", outer)
    if word is not None:
        return _ends_after_word(word.group(), decoration.group())
    if re.search(rf"[{_OPERAND}]\Z", outer) is not None:
        return _ends_after_operand(outer, decoration.group(), number)
    last = outer[-1:]
    is_numeric = last.isnumeric() or unicodedata.combining(last or " ") > 0
    return not (is_numeric or last in _OPERATORS or outer.endswith(_COMPARISONS))


def _ends_after_word(word: str, decoration: str) -> bool:
    """Return True if a word before a number is apart from it and changes no value."""
    if any(character.isspace() for character in decoration):
        return _WORD_BEFORE.fullmatch(word) is None
    return _CURRENCY.fullmatch(word) is not None


def _ends_after_operand(outer: str, decoration: str, number: str) -> bool:
    """Return True if a digit, a letter or a closing bracket before a number is apart from it."""
    token = outer.split()[-1]
    follows_thousands = re.match(r"[0-9]{3}(?![0-9])", number) is not None and (
        _THOUSANDS.search(outer + decoration) is not None
    )
    return (
        decoration[:1].isspace()
        and not set(decoration) & set("([{*+\\~")
        and not set(token) & set("\\^_")
        and not token.endswith(("}", "]"))
        and number[0] not in "-\u2212"
        and not follows_thousands
    )


def _ends_after(before: str, number: str, after: str) -> bool:
    """Return True if the text after a number is not of the same expression."""
    if _continues(before, number, after):
        return False
    decoration = _AFTER.match(after)
    assert decoration is not None  # it may be empty
    if _WORDS_AFTER.search(re.sub(r"[\\{}]", " ", decoration.group().replace("\\text", ""))):
        return False
    rest = after[decoration.end() :]
    unit = re.match(rf"[{_LETTER}]+", rest)
    if unit is not None:
        is_unit = _UNIT.fullmatch(unit.group()) is not None
        return is_unit and _ends_after(before, number, rest[unit.end() :])
    if re.match(r"[^\S\n]*\\[A-Za-z]", rest) is not None:
        return _COMMAND.match(rest) is not None
    return _EXPRESSION.match(rest) is None and _WORDS_AFTER.match(rest) is None


def _continues(before: str, number: str, after: str) -> bool:
    """Return True if the next character is of a number too, or changes its value."""
    next_character = after[:1]
    is_digit = next_character.isnumeric() or unicodedata.combining(next_character or " ") > 0
    is_factorial = next_character == "!" and _WORD.search(before) is None
    is_repeating = "." in number and after.startswith(("...", "\u2026"))
    is_absolute = number[0] in "-\u2212" and before.endswith("|") and next_character == "|"
    return is_digit or is_factorial or is_repeating or is_absolute


def _open_bracket(before: str) -> int | None:
    """Return the position of the last bracket that is not closed, or None."""
    depth = 0
    for position in range(len(before) - 1, -1, -1):
        if before[position] in ")]}":
            depth += 1
        elif before[position] in "([{":
            if depth == 0:
                return position
            depth -= 1
    return None


def _is_alone_in_brackets(before: str, opening: int, after: str) -> bool:
    """Return True if a number in brackets is no argument and not one of several values."""
    outer = before[:opening]
    contents = before[opening + 1 :]
    is_plain = before[opening] == "{" and re.search(rf"{_STYLE}\Z", outer) is not None
    if not is_plain and not outer.endswith("\\left") and re.search(rf"[{_OPERAND}^_]\Z", outer):
        return False
    has_values = any(character in contents for character in ",;") and not _WORD.search(contents)
    return not has_values and _FURTHER_VALUES.match(after) is None
