r"""Judges answers to multiple-choice questions: the letter of an option.

A response states an option in one of these ways, and its last statement counts:

    \boxed{B}, \boxed{\text{(B)}}      the answer is (B), Answer: B      B is correct
    B, (B), **B.** or B) alone in the last line
"""

from __future__ import annotations

import re
import string

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.rewards.answers import last_boxed, last_line
from megatron_rl.rewards.verifiers.verifier import Verifier

_MAX_CHARACTERS = 20_000  # of the end of a response, where statements are looked for
_STYLE = r"(?:\\(?:text|textbf|mathrm|mathbf|textit)\s*\{|[\s*_$`\"'({\[:]|\\\(|\\\[)"
_END = r"(?:[)\]}*_`\"'$.:,;!]|\\\)|\\\])*"
# A letter alone, or before the text of its option: `B) Paris`
_LETTER = r"([A-Z])(?![A-Za-z0-9'\u2019^=+/<>-])"
_BEHIND = re.compile(
    r"(?:\banswer|\b(?:correct|right|best)\s+(?:option|choice|one|letter)|\bI\s+(?:choose|pick))\b"
    rf"(?:\s+(?:is|must\s+be|would\s+be|should\s+be)\b|\s*:)?(?:\s+(?:option|choice|letter))?"
    rf"{_STYLE}{{1,12}}(?:(?:option|choice|letter)\s+\(?)?{_LETTER}",
    re.IGNORECASE,
)
_BEFORE = re.compile(rf"(?<![A-Za-z'\u2019]){_LETTER}\)?\s+is\s+(?:the\s+)?(?:correct|right)\b")
_ALONE = re.compile(rf"{_STYLE}{{0,12}}([A-Za-z]){_END}")
_IN_BOX = re.compile(rf"{_STYLE}{{0,12}}([A-Za-z])(?:{_END}|[).:]\s.*)", re.DOTALL)
# Further options of the same statement: `B or C`, `(B) and (C)`
_FURTHER = re.compile(r"(?:\bor\b|\band\b|/|,|&)[\s*(]*([A-Z])(?![A-Za-z0-9'\u2019])")
# Letters that are words, too. Before another word they state nothing: `the answer is A good one`.
_WORDS = ("A", "I")
_WORD = re.compile(r"\s+[a-z]")


class ChoiceVerifier(Verifier):
    """Rewards 1 if a response states the reference's option last, and 0 otherwise.

    letters: the options. A response that states two of them at once has no answer.
    """

    def __init__(self, letters: str = string.ascii_uppercase) -> None:
        super().__init__()
        if not letters or len(set(letters)) != len(letters) or not set(letters) <= _LETTERS:
            raise ValueError(f"letters={letters!r}: give different letters from A to Z")
        self._letters = letters

    def check_answer(self, question: Question) -> None:
        """Raise ValueError for a reference that is not one of the letters."""
        self._reference(question.answer)

    def grade(self, prompt: Prompt, text: str) -> Verdict:
        """Compare the option of a response with the reference."""
        answer = stated_option(text)
        if answer is not None and answer not in self._letters:
            answer = None
        correctness = float(answer == self._reference(prompt.answer))
        return Verdict(reward=correctness, correctness=correctness, answer=answer)

    def _reference(self, text: str) -> str:
        match = _IN_BOX.fullmatch((last_boxed(text) or text).strip())
        if match is None or match[1].upper() not in self._letters:
            raise ValueError(
                f"the reference answer {text[:80]!r} is not one of the letters {self._letters}. "
                "Write the letter of the correct option"
            )
        return match[1].upper()


_LETTERS = frozenset(string.ascii_uppercase)


def stated_option(text: str) -> str | None:
    """Return the letter of the option that a response states last, None without or with several."""
    text = text[-_MAX_CHARACTERS:]
    if "\\boxed{" in text:
        match = _IN_BOX.fullmatch(last_boxed(text) or "")
        return match[1].upper() if match is not None else None
    line = last_line(text) or ""
    alone = _ALONE.fullmatch(line)
    if alone is not None:
        return alone[1].upper()
    statements = [*_BEHIND.finditer(text), *_BEFORE.finditer(text)]
    statements = [match for match in statements if _is_statement(match)]
    if not statements:
        return None
    last = max(statements, key=lambda match: match.start(1))
    rest = re.split(r"[\n.;!?]", text[last.end(1) :], maxsplit=1)[0]
    others = {match[1] for match in _FURTHER.finditer(rest)} - {last[1]}
    return None if others else last[1]


def _is_statement(match: re.Match[str]) -> bool:
    """Return True if a letter is one in upper case, and no word of a sentence."""
    letter = match[1]
    is_word = letter in _WORDS and _WORD.match(match.string, match.end(1)) is not None
    return letter.isupper() and not (is_word and match.re is _BEHIND)
