"""The letter of an option that a response states last."""

import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.plugins import PluginError
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.rewards import open_scorer
from megatron_rl.rewards.verifiers.choice import ChoiceVerifier, stated_option
from tests.support.questions import make_question


@pytest.mark.parametrize(
    ("text", "option"),
    [
        (r"\boxed{B}", "B"),
        (r"\boxed{\text{(C)}}", "C"),
        (r"\boxed{\textbf{(D) } 7}", "D"),
        (r"\boxed{b}", "B"),
        (r"The answer is A. \boxed{7}", None),
        ("The answer is (B).", "B"),
        ("Answer: C", "C"),
        ("**Answer:** **D**", "D"),
        ("The answer is: \\(D\\)", "D"),
        ("The final answer is $\\boxed{A}$. I hope it is correct.", "A"),
        ("the correct option is B) Paris", "B"),
        ("The correct answer is option E.", "E"),
        ("The answer is B because it fits.", "B"),
        ("I choose B.", "B"),
        ("Therefore, A is correct.", "A"),
        ("A. one\nB. two\nSo\n\n(b)", "B"),
        ("It is\n**C.**", "C"),
        ("the answer is A. No, the answer is B.", "B"),
        ("The answer is A. B is wrong.", "A"),
        ("The answer is A, not B.", "A"),
        ("The answer is A or B", None),
        ("The answer is (A) and (C).", None),
        ("The answer is A good one", None),
        ("The answer is what I think", None),
        ("The answer is not A.", None),
        ("The answer is A^2 + 1", None),
        ("The answer is Berlin", None),
        ("A. one\nB. two", None),
        ("", None),
    ],
)
def test_option_of_a_response(text: str, option: str | None) -> None:
    assert stated_option(text) == option


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(string.ascii_uppercase), st.text(alphabet="abc .,\n*()", max_size=30))
def test_last_statement_counts(letter: str, text: str) -> None:
    other = "A" if letter != "A" else "B"
    assert stated_option(f"The answer is ({other}).\n{text}\nThe answer is ({letter}).") == letter
    assert stated_option(rf"Answer: {other} {text} \boxed{{{letter}}}") == letter


def grade(verifier: ChoiceVerifier, answer: str, text: str) -> tuple[float | None, str | None]:
    verdict = verifier.grade(Prompt(id="p", token_ids=(), answer=answer, task="t"), text)
    return verdict.reward, verdict.answer


def test_references_and_letters() -> None:
    verifier = ChoiceVerifier()
    assert grade(verifier, "(b)", "Answer: B") == (1.0, "B")
    assert grade(verifier, r"\boxed{B}", "Answer: C") == (0.0, "C")
    assert grade(verifier, "B. Paris", "no option") == (0.0, None)
    four = open_scorer(RewardSettings(name="choice", options={"letters": "ABCD"}))
    assert isinstance(four, ChoiceVerifier)
    assert grade(four, "A", "Answer: E") == (0.0, None)
    four.check_answer(make_question("D"))
    for answer in ("E", "", "AB", "Paris"):
        with pytest.raises(ValueError, match="is not one of the letters ABCD"):
            four.check_answer(make_question(answer))


@pytest.mark.parametrize("letters", ["", "AA", "ab", "A1"])
def test_letters_have_to_be_different_letters(letters: str) -> None:
    with pytest.raises(PluginError, match=r"reward\.options: .*give different letters from A to Z"):
        open_scorer(RewardSettings(name="choice", options={"letters": letters}))
