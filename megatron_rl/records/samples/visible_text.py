"""Makes text of a model safe to print: it cannot move the cursor or set a colour."""

from __future__ import annotations

import unicodedata

# Control characters, invisible and directional ones, surrogates, characters without a meaning, and
# separators of lines and paragraphs
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def visible_text(text: str, *, keep_newlines: bool = False) -> str:
    r"""Return the text with every character that has no picture as an escape, such as \x1b.

    keep_newlines: keep line feeds.
    """
    if text.isprintable():
        return text
    return "".join(_visible(character, keep_newlines=keep_newlines) for character in text)


def _visible(character: str, *, keep_newlines: bool) -> str:
    if keep_newlines and character == "\n":
        return character
    if unicodedata.category(character) in _HIDDEN_CATEGORIES:
        return character.encode("unicode_escape").decode()
    return character
