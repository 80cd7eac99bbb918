"""Responses on which counts and searches take long."""

from __future__ import annotations

import json
from typing import Any

from tests.support.hostile.cases import HostileCases, make_prompt

_INSTRUCTIONS: list[list[dict[str, Any]]] = [
    [
        {"name": name, "at_least": 2, "at_most": 100}
        for name in ("words", "sentences", "paragraphs", "bullets", "highlights", "placeholders")
    ],
    [
        {"name": "keyword_frequency", "keyword": "aa", "at_most": 3},
        {"name": "letter_frequency", "letter": "a", "at_least": 1},
        {"name": "keywords_present", "keywords": ["a a", "a"]},
        {"name": "sections", "heading": "Section", "at_least": 1},
        {"name": "capital_words", "at_most": 10},
        {"name": "postscript"},
        {"name": "title"},
    ],
    [
        {"name": "json_only"},
        {"name": "script", "scripts": ["latin"]},
        {"name": "repeat_prompt", "prompt": "a"},
        {"name": "two_responses"},
        {"name": "quoted"},
        {"name": "one_of", "options": ["a"]},
        {"name": "paragraph_starts_with", "paragraph": 2, "word": "a"},
    ],
]
_PIECES = (
    "a",
    " ",
    "\n",
    "\n ",
    "\n\n",
    "*",
    "**",
    "* ",
    "*a",
    "*a ",
    "**a*",
    "[",
    "]",
    "[a",
    "[]",
    "<",
    "<<",
    "<<a",
    "<<a>",
    "<<>>",
    ".",
    "1.",
    "1.1",
    "a.",
    "!",
    "?!",
    "-",
    "- ",
    "\n- ",
    "\n-",
    "'",
    "a'",
    "a-",
    "a'a",
    "-'",
    "P.S.",
    "\nP.S.",
    "\nP.S. ",
    "Section 1",
    "\nSection ",
    "\nSection 1\n",
    "#",
    "\n#",
    "\n# ",
    "******",
    "*******",
    '"',
    '\\"',
    '{"a":',
    "[1,",
    "```",
    "```json\n",
    "\u4e00",
    "\u0301",
    "a\u0301",
    "\u200b",
    "\U0001f600",
    "\x00",
    "\ud7ff",
    ",",
    "A",
    "AA ",
    "Aa",
    "\u0130",
    "\u00df",
)

CASES = HostileCases(
    name="instructions",
    options={},
    prompts=[
        make_prompt("", json.dumps({"instructions": instructions}))
        for instructions in _INSTRUCTIONS
    ],
    # As long as a response may be, and longer
    responses=[
        text
        for piece in _PIECES
        for text in (piece * (199_000 // len(piece)), piece * (3_000_000 // len(piece)))
    ],
    ordinary=["a a. a aa!", "<<a>>\nSection 1\nP.S. a", '"a"', "a"],
)
