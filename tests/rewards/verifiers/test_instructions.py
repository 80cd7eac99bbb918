"""Instructions about the form of a response, each with responses that follow it or do not."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.rewards import open_scorer
from megatron_rl.rewards.verifiers.instructions import InstructionsVerifier
from tests.support.questions import make_question

# name, arguments, responses that satisfy it, responses that do not
CASES: list[tuple[str, dict[str, Any], list[str], list[str]]] = [
    ("characters", {"at_most": 5}, ["  abcde  "], ["abcdef"]),
    ("words", {"at_least": 2, "at_most": 3}, ["it's well-known", "a b c"], ["one", "a b c d"]),
    (
        "sentences",
        {"at_least": 2, "at_most": 2},
        ["One 3.5. Two!", "A... B?"],
        ["One.", "1. 2. 3."],
    ),
    ("paragraphs", {"at_least": 2, "at_most": 2}, ["a\n\nb", "a\n \n\nb\nc\n\n"], ["a\nb", "a"]),
    ("bullets", {"at_least": 2, "at_most": 2}, ["- a\n* b", " 1. a\n2) b"], ["- a", "-a\n-b"]),
    ("sections", {"heading": "Section", "at_least": 2}, ["# Section 1\nSection 2"], ["Section 1"]),
    ("highlights", {"at_least": 2}, ["*a* and **b c**", "*x* *yy*"], ["*a*", "* a *"]),
    ("placeholders", {"at_least": 2}, ["[name] [city]"], ["[name]", "[] []"]),
    ("capital_words", {"at_most": 1}, ["A GOOD day", "no"], ["A GOOD DAY"]),
    ("keyword_frequency", {"keyword": "cat", "at_least": 2}, ["Cat, cat"], ["cat cats", "cat"]),
    ("letter_frequency", {"letter": "e", "at_most": 2}, ["Eve"], ["eleven"]),
    ("keywords_present", {"keywords": ["red", "blue sky"]}, ["Blue sky, red!"], ["red", "redblue"]),
    ("keywords_absent", {"keywords": ["red"]}, ["reddish"], ["It is Red."]),
    ("upper_case", {}, ["ALL 3!"], ["All", "3"]),
    ("lower_case", {}, ["all 3!"], ["All", "3"]),
    ("no_commas", {}, ["a; b"], ["a, b", "\u4e00\uff0c\u4e8c"]),
    ("starts_with", {"text": "Dear"}, ["  Dear you"], ["Hello Dear"]),
    ("ends_with", {"text": "Bye."}, ["x Bye.\n"], ["Bye. x"]),
    (
        "paragraph_starts_with",
        {"paragraph": 2, "word": "then"},
        ["a\n\nThen b"],
        ["then", "a\n\nb"],
    ),
    ("quoted", {}, ['"a b"', "\u201ca\u201d"], ['"a', '""', "a"]),
    ("postscript", {}, ["x\nP.S. more"], ["x\nP.S.", "x P.S. more"]),
    ("postscript", {"marker": "P.P.S"}, ["x\n**P.P.S** more"], ["x\nP.S. more"]),
    ("title", {}, ["<<A day>>\nx"], ["<< >>", "<A>"]),
    (
        "json_only",
        {},
        ['{"a": 1}', "```json\n[1]\n```"],
        ["x {}", "{'a': 1}", "```json\n[1]\n``` x"],
    ),
    (
        "script",
        {"scripts": ["cyrillic"]},
        ["\u041f\u0440\u0438\u0432\u0435\u0442, 3!"],
        ["Hi", "3"],
    ),
    ("script", {"scripts": ["cjk", "hiragana"]}, ["\u6771\u4eac\u306f"], ["\u6771\u4eac abc"]),
    (
        "repeat_prompt",
        {"prompt": "What is 2?"},
        ["What is 2? It is 2."],
        ["What is 2?", "It is 2."],
    ),
    ("two_responses", {}, ["a ****** b"], ["a ****** a", "a", "a ****** b ****** c", "a ******"]),
    ("one_of", {"options": ["Yes.", "No."]}, ["Yes.", " No "], ["Maybe", "Yes. No."]),
]


def grade(details: Any, text: str, **options: bool) -> float | None:
    verifier = InstructionsVerifier(**options)
    text_of_details = json.dumps(details)
    verifier.check_answer(make_question("", text_of_details))
    prompt = Prompt(id="p", token_ids=(), answer="", task="t", details=text_of_details)
    return verifier.grade(prompt, text).reward


@pytest.mark.parametrize(("name", "arguments", "good", "bad"), CASES)
def test_instruction(name: str, arguments: dict[str, Any], good: list[str], bad: list[str]) -> None:
    details = {"instructions": [{"name": name, **arguments}]}
    assert [grade(details, text) for text in good] == [1.0] * len(good)
    assert [grade(details, text) for text in bad] == [0.0] * len(bad)


def test_reward_is_the_share_or_strict() -> None:
    instructions = [{"name": "no_commas"}, {"name": "upper_case"}, {"name": "words", "at_most": 3}]
    details = {"instructions": instructions}
    assert grade(details, "a, b") == pytest.approx(1 / 3)
    assert grade(details, "a b", strict=True) == 0
    assert grade(details, "A B", strict=True) == 1
    assert grade(details, "A" * 200_001) == 0


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80), st.integers(0, 20))
def test_counts_below_and_above_a_number_exclude_each_other(text: str, number: int) -> None:
    for name in ("words", "sentences", "paragraphs", "bullets", "highlights", "placeholders"):
        above = grade({"instructions": [{"name": name, "at_least": number + 1}]}, text)
        below = grade({"instructions": [{"name": name, "at_most": number}]}, text)
        assert (above, below) in ((0.0, 1.0), (1.0, 0.0))


@pytest.mark.parametrize(
    ("details", "problem"),
    [
        ("", "truncated"),
        ('{"instructions": []}', "length >= 1"),
        ('{"instructions": [{"name": "none"}]}', "Invalid value 'none'"),
        ('{"instructions": [{"name": "words"}]}', "give at_least, at_most, or both"),
        ('{"instructions": [{"name": "words", "at_least": 3, "at_most": 2}]}', "3 is more than"),
        ('{"instructions": [{"name": "words", "at_least": -1}]}', ">= 0"),
        ('{"instructions": [{"name": "words", "at_mots": 1}]}', "unknown field `at_mots`"),
        ('{"instructions": [{"name": "keywords_present", "keywords": []}]}', "length >= 1"),
        ('{"instructions": [{"name": "starts_with"}]}', "missing required field `text`"),
    ],
)
def test_unusable_instructions_are_refused(details: str, problem: str) -> None:
    scorer = open_scorer(RewardSettings(name="instructions"))
    with pytest.raises(ValueError, match=rf"(?s)details .*{problem}.*docs/verifiers\.md"):
        scorer.check_answer(make_question("", details))


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"strict": "yes"}, "give true or false"), ({"strikt": True}, "Did you mean strict")],
)
def test_unusable_options_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PluginError, match=rf"reward\.options.*{problem}"):
        open_scorer(RewardSettings(name="instructions", options=options))
