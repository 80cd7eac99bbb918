"""Text of a model as a terminal shows it."""

import re
import sys
import unicodedata

import pytest

from megatron_rl.records.samples.visible_text import visible_text


@pytest.mark.parametrize(
    ("text", "shown_text"),
    [
        ("plain, ü, 漢字 and \N{SNOWMAN}", "plain, ü, 漢字 and \N{SNOWMAN}"),
        ("\x1b[31mred\x1b]0;title\x07", r"\x1b[31mred\x1b]0;title\x07"),
        ("\x9b2J", r"\x9b2J"),
        ("a\rb\tc\x08d\x7f", r"a\rb\tc\x08d\x7f"),
        ("\u202eabc\u2066\u200b", r"\u202eabc\u2066\u200b"),
        ("\u2028\ud800\U000e0041", r"\u2028\ud800\U000e0041"),
        ("line\nline", r"line\nline"),
    ],
)
def test_characters_without_a_picture_become_escapes(text: str, shown_text: str) -> None:
    assert visible_text(text) == shown_text


def test_newlines_may_stay() -> None:
    assert visible_text("a\r\nb\n", keep_newlines=True) == "a\\r\nb\n"


@pytest.mark.slow
def test_no_character_of_unicode_controls_a_terminal() -> None:
    text = visible_text("".join(map(chr, range(sys.maxunicode + 1))))
    categories = {unicodedata.category(character) for character in set(text)}
    assert not categories & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", text)
