"""Constraints on the form of a response, each of which a program can check.

They follow the kinds of IFEval (https://arxiv.org/abs/2311.07911, table 1), with rules of this
project that need no data and no model: the language of a text is judged by its script.
Each class is one constraint. Its tag is its name in a row's details, and its fields are arguments.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from typing import Annotated

import msgspec

from megatron_rl.rewards.verifiers.json_text import last_json, read_json

Texts = Annotated[list[Annotated[str, msgspec.Meta(min_length=1)]], msgspec.Meta(min_length=1)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Letter = Annotated[str, msgspec.Meta(min_length=1, max_length=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Place = Annotated[int, msgspec.Meta(ge=1)]

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_END_OF_SENTENCE = re.compile(r"[.!?\u3002\uff01\uff1f]+")
_DECIMAL_POINT = re.compile(r"(?<=[0-9])\.(?=[0-9])")
_BULLET = re.compile(r"^[^\S\n]*(?:[-*+\u2022]|[0-9]{1,3}[.)])[^\S\n]+\S", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_QUOTES = (('"', '"'), ("\u201c", "\u201d"), ("\u00ab", "\u00bb"))


class Constraint(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name"):
    """A constraint on a response."""

    def holds(self, text: str) -> bool:
        """Return True if a response satisfies the constraint."""
        raise NotImplementedError


class Counted(Constraint, frozen=True):
    """A constraint on a number of things: at least, at most, or both. Equal ones: exactly."""

    at_least: Number | None = None
    at_most: Number | None = None

    def __post_init__(self) -> None:
        if self.at_least is None and self.at_most is None:
            raise ValueError("give at_least, at_most, or both")
        if self.at_most is not None and (self.at_least or 0) > self.at_most:
            raise ValueError(f"at_least {self.at_least} is more than at_most {self.at_most}")

    def holds(self, text: str) -> bool:
        number = self.count(text)
        return (self.at_least or 0) <= number and (self.at_most is None or number <= self.at_most)

    def count(self, text: str) -> int:
        """Count the things in a response."""
        raise NotImplementedError


class Characters(Counted, frozen=True, tag="characters"):
    """Characters without white space around the text."""

    def count(self, text: str) -> int:
        return len(text.strip())


class Words(Counted, frozen=True, tag="words"):
    """Words, also with apostrophes and hyphens."""

    def count(self, text: str) -> int:
        return len(_WORD.findall(text))


class Sentences(Counted, frozen=True, tag="sentences"):
    """Parts with a letter or digit that `.`, `!` or `?` ends, except for decimal points."""

    def count(self, text: str) -> int:
        parts = _END_OF_SENTENCE.split(_DECIMAL_POINT.sub(",", text))
        return sum(_WORD.search(part) is not None for part in parts)


class Paragraphs(Counted, frozen=True, tag="paragraphs"):
    """Parts between blank lines."""

    def count(self, text: str) -> int:
        return len(_paragraphs(text))


class Bullets(Counted, frozen=True, tag="bullets"):
    """Lines of a list: `- x`, `* x`, `1. x`."""

    def count(self, text: str) -> int:
        return len(_BULLET.findall(text))


class Sections(Counted, frozen=True, tag="sections", kw_only=True):
    """Lines that begin with a word such as `Section`, and a number."""

    heading: Text

    def count(self, text: str) -> int:
        heading = rf"^[ \t#*]*{re.escape(self.heading)}[ \t]+[0-9]+\b"
        return len(re.findall(heading, text, re.MULTILINE))


class Highlights(Counted, frozen=True, tag="highlights"):
    """Parts between asterisks: `*x*` or `**x**`."""

    def count(self, text: str) -> int:
        return len(re.findall(r"(?<!\*)(\*{1,2})(?=[^\s*])[^*\n]*[^\s*]\1(?!\*)", text))


class Placeholders(Counted, frozen=True, tag="placeholders"):
    """Parts between square brackets, such as `[address]`."""

    def count(self, text: str) -> int:
        return len(re.findall(r"\[[^\[\]\n]+\]", text))


class CapitalWords(Counted, frozen=True, tag="capital_words"):
    """Words of at least two letters, all in upper case."""

    def count(self, text: str) -> int:
        return sum(len(word) > 1 and word.isupper() for word in _WORD.findall(text))


class KeywordFrequency(Counted, frozen=True, tag="keyword_frequency", kw_only=True):
    """Occurrences of a word or phrase, in any case."""

    keyword: Text

    def count(self, text: str) -> int:
        return len(_occurrences(self.keyword, text))


class LetterFrequency(Counted, frozen=True, tag="letter_frequency", kw_only=True):
    """Occurrences of a letter, in any case."""

    letter: Letter

    def count(self, text: str) -> int:
        return text.casefold().count(self.letter.casefold())


class KeywordsPresent(Constraint, frozen=True, tag="keywords_present"):
    """All words or phrases occur, in any case."""

    keywords: Texts

    def holds(self, text: str) -> bool:
        return all(_occurrences(keyword, text) for keyword in self.keywords)


class KeywordsAbsent(Constraint, frozen=True, tag="keywords_absent"):
    """None of the words or phrases occurs, in any case."""

    keywords: Texts

    def holds(self, text: str) -> bool:
        return not any(_occurrences(keyword, text) for keyword in self.keywords)


class UpperCase(Constraint, frozen=True, tag="upper_case"):
    """No letter is in lower case."""

    def holds(self, text: str) -> bool:
        return text.isupper()


class LowerCase(Constraint, frozen=True, tag="lower_case"):
    """No letter is in upper case."""

    def holds(self, text: str) -> bool:
        return text.islower()


class NoCommas(Constraint, frozen=True, tag="no_commas"):
    """There is no comma, of any script."""

    def holds(self, text: str) -> bool:
        return not re.search("[,\u060c\u3001\uff0c]", text)


class StartsWith(Constraint, frozen=True, tag="starts_with"):
    """The response begins with a text."""

    text: Text

    def holds(self, text: str) -> bool:
        return text.lstrip().startswith(self.text)


class EndsWith(Constraint, frozen=True, tag="ends_with"):
    """The response ends with a text."""

    text: Text

    def holds(self, text: str) -> bool:
        return text.rstrip().endswith(self.text)


class ParagraphStartsWith(Constraint, frozen=True, tag="paragraph_starts_with"):
    """A paragraph begins with a word, in any case. paragraph: from 1."""

    paragraph: Place
    word: Text

    def holds(self, text: str) -> bool:
        paragraphs = _paragraphs(text)
        if len(paragraphs) < self.paragraph:
            return False
        words = _WORD.findall(paragraphs[self.paragraph - 1])
        return bool(words) and words[0].casefold() == self.word.casefold()


class Quoted(Constraint, frozen=True, tag="quoted"):
    """The whole response stands between quotation marks."""

    def holds(self, text: str) -> bool:
        text = text.strip()
        return len(text) > 2 and any(text[0] == a and text[-1] == b for a, b in _QUOTES)


class Postscript(Constraint, frozen=True, tag="postscript"):
    """A line begins with `P.S.` or another marker, and has text behind it."""

    marker: Text = "P.S."

    def holds(self, text: str) -> bool:
        return re.search(rf"^[ \t*_]*{re.escape(self.marker)}.*\w", text, re.MULTILINE) is not None


class Title(Constraint, frozen=True, tag="title"):
    """There is a title, as `<<title>>`."""

    def holds(self, text: str) -> bool:
        titles = re.findall(r"<<([^<>\n]+)>>", text)
        return any(_WORD.search(title) for title in titles)


class JsonOnly(Constraint, frozen=True, tag="json_only"):
    """The whole response is JSON, also in one fenced block."""

    def holds(self, text: str) -> bool:
        text = text.strip()
        is_block = text.startswith("```") and text.endswith("```") and text.count("```") == 2
        try:
            read_json(last_json(text) if is_block else text)
        except (ValueError, RecursionError):
            return False
        return True


class Script(Constraint, frozen=True, tag="script"):
    """At least a share of the letters is of a script, as Unicode's names say: latin, cjk, ...

    scripts: one or several, such as [hiragana, katakana, cjk].
    """

    scripts: Texts
    share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.9

    def holds(self, text: str) -> bool:
        letters = Counter(character for character in text if character.isalpha())
        scripts = {script.casefold() for script in self.scripts}
        of_scripts = sum(
            count for letter, count in letters.items() if _script_of(letter) in scripts
        )
        return of_scripts > 0 and of_scripts >= self.share * letters.total()


class RepeatPrompt(Constraint, frozen=True, tag="repeat_prompt"):
    """The response begins with the text of the prompt, and goes on."""

    prompt: Text

    def holds(self, text: str) -> bool:
        text = text.strip()
        return text.startswith(self.prompt.strip()) and len(text) > len(self.prompt.strip())


class TwoResponses(Constraint, frozen=True, tag="two_responses"):
    """There are two different responses with six asterisks between them."""

    def holds(self, text: str) -> bool:
        parts = [part.strip() for part in text.split("******")]
        return len(parts) == 2 and all(parts) and parts[0] != parts[1]


class OneOf(Constraint, frozen=True, tag="one_of"):
    """The whole response is one of several texts, but for white space and a full stop."""

    options: Texts

    def holds(self, text: str) -> bool:
        return text.strip().rstrip(".") in {option.rstrip(".") for option in self.options}


AnyConstraint = (
    Characters
    | Words
    | Sentences
    | Paragraphs
    | Bullets
    | Sections
    | Highlights
    | Placeholders
    | CapitalWords
    | KeywordFrequency
    | LetterFrequency
    | KeywordsPresent
    | KeywordsAbsent
    | UpperCase
    | LowerCase
    | NoCommas
    | StartsWith
    | EndsWith
    | ParagraphStartsWith
    | Quoted
    | Postscript
    | Title
    | JsonOnly
    | Script
    | RepeatPrompt
    | TwoResponses
    | OneOf
)


def _occurrences(keyword: str, text: str) -> list[str]:
    """Return the places where a word or phrase occurs as such, in any case."""
    return re.findall(rf"(?<!\w){re.escape(keyword)}(?!\w)", text, re.IGNORECASE)


def _paragraphs(text: str) -> list[str]:
    return [part for part in _BLANK_LINES.split(text.strip()) if part.strip()]


def _script_of(letter: str) -> str:
    return unicodedata.name(letter, "").partition(" ")[0].casefold()
