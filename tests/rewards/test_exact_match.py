"""Exact match: the rule that finds the answer, references and finish reasons."""

import asyncio
import re

import pytest

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import ExactMatch
from tests.support.questions import make_question


def score(
    text: str, reference: str = "170151", *, rule: str = "last_number", finish: str = "stop"
) -> Verdict:
    prompt = Prompt(id="p", token_ids=(1,), answer=reference, task="t")
    return asyncio.run(ExactMatch(rule).score(prompt, text, FinishReason(finish)))


@pytest.mark.parametrize(
    ("text", "reward", "answer"),
    [
        ("a11b05c11d10e17>170151", 1.0, "170151"),
        ("a99b99>170151", 1.0, "170151"),  # the steps before the answer are not checked
        ("a11b05c11d10e17>170152", 0.0, "170152"),
        ("a11b05c11d10e17>170151>0", 0.0, "0"),
        ("a11b05>1701<pad>51", 0.0, "51"),
        ("", 0.0, None),
        (">>>", 0.0, None),
    ],
)
def test_the_last_number_decides(text: str, reward: float, answer: str | None) -> None:
    verdict = score(text)
    assert (verdict.reward, verdict.correctness, verdict.answer) == (reward, reward, answer)


def test_truncated_response_is_incorrect_and_has_no_answer() -> None:
    verdict = score("a11b05c11d10e17>170151", finish="length")
    assert (verdict.reward, verdict.correctness, verdict.answer) == (0.0, 0.0, None)


def test_aborted_response_is_not_scored() -> None:
    with pytest.raises(ValueError, match="aborted"):
        score("1", finish="abort")


@pytest.mark.parametrize(
    ("rule", "text", "reference"),
    [
        ("last_number", "so 1,000.0", "1000"),
        ("last_number", "7", "it is 3 + 4 #### 7"),
        ("last_line", "because\n  Paris \n", "Paris"),
        ("boxed", r"thus \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"thus \boxed{0.50}", r"\boxed{.5}".replace(".5", "0.5")),
    ],
)
def test_each_rule_reads_response_and_reference(rule: str, text: str, reference: str) -> None:
    assert score(text, reference, rule=rule).reward == 1.0
    assert score(text + "\n8", reference, rule=rule).reward == (1.0 if rule == "boxed" else 0.0)


def test_reference_without_an_answer_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"reward\.answer=last_number: the reference answer 'Paris' holds no answer",
    ):
        ExactMatch("last_number").check_answer(make_question("Paris"))
    with pytest.raises(ValueError, match="Paris"):
        score("5", "Paris")
    ExactMatch("last_line").check_answer(make_question("Paris"))
    ExactMatch("boxed").check_answer(make_question("Paris"))
    with pytest.raises(ValueError, match="holds no answer"):
        ExactMatch("boxed").check_answer(make_question("  "))


@pytest.mark.parametrize(
    ("answer", "number"),
    [("1e5", "5"), ("1/2", "2"), ("1 000", "000"), ("2)-5", "5"), ("-2.5E-3", "3")],
)
def test_reference_with_an_ambiguous_number_is_refused(answer: str, number: str) -> None:
    message = rf"reward\.answer=last_number: .*'{re.escape(answer)}' .* '{number}'.*plain"
    with pytest.raises(ValueError, match=message):
        ExactMatch("last_number").check_answer(make_question(answer))
    ExactMatch("last_line").check_answer(make_question(answer))
    ExactMatch("boxed").check_answer(make_question(answer))


@pytest.mark.parametrize(
    "answer",
    ["3 boys, 4 girls", "in 2024 42", "2 or so, then 5", "48/2 and then 72", "A5"],
)
def test_reference_with_several_numbers_is_refused(answer: str) -> None:
    with pytest.raises(ValueError, match=r"holds several numbers, .*Write the final one alone"):
        ExactMatch("last_number").check_answer(make_question(answer))


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (r"10{,}000", "10000"),
        (r"11,\!090", "11090"),
        ("2 + 3 = 5", "5"),
        ("She sold 48 in 2 days.\nThe answer is 72", "72"),
        ("She sold 48 in 2 days. #### 1,072", "1072"),
        ("$18 dollars", "18"),
        (r"The 2 values agree: $\boxed{42}$.", "42"),
    ],
)
def test_reference_with_known_decoration_is_one_number(answer: str, text: str) -> None:
    ExactMatch("last_number").check_answer(make_question(answer))
    assert score(text, answer).reward == score(f"so it is {text}.", answer).reward == 1.0


@pytest.mark.parametrize(
    ("text", "reference"),
    [
        ("1/2", "2"),
        ("2×16", "16"),
        ("2**16", "16"),
        (r"\sqrt{4}", "4"),
        ("-(4)", "4"),
        (r"\frac14", "14"),
        ("0.(3)", "3"),
        (r"so it is \frac{1}{2}", "2"),
        ("1e5", "5"),
        ("10^2", "2"),
        ("12 000", "0"),
        ("12-5", "5"),
        ("x\u22125", "5"),
    ],
)
def test_a_part_of_a_number_in_a_response_is_no_answer(text: str, reference: str) -> None:
    verdict = score(text, reference)
    assert (verdict.reward, verdict.correctness, verdict.answer) == (0.0, 0.0, None)


def test_a_unicode_minus_is_a_minus() -> None:
    assert score("it is \u22125", "5").reward == 0.0
    assert score("it is \u22125", "-5").reward == score("it is -5", "\u22125").reward == 1.0


def test_only_the_last_number_must_be_whole() -> None:
    assert score("so x/2 = 10/2 = 5", "5").reward == 1.0
    assert score("it is .5", "0.5").reward == score("it is 0.50", ".5").reward == 1.0
