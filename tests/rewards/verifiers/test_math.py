"""Mathematical answers are compared by value."""

from __future__ import annotations

import asyncio
import os
import re
import time
from fractions import Fraction

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.config.schema import RewardSettings
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards import open_scorer
from megatron_rl.rewards.verifiers.math import MathVerifier
from tests.support.questions import make_question

EQUAL = [
    (r"\frac{1}{2}", "0.5"),
    (r"\frac12", r"\dfrac{2}{4}"),
    ("1000", "1,000"),
    ("1000", r"1\,000"),
    ("100000", "1e5"),
    ("1.5e-3", "0.0015"),
    (r"50\%", "0.5"),
    ("50%", "50"),
    (r"\sqrt{8}", r"2\sqrt{2}"),
    ("x^2+2x+1", "(x+1)^2"),
    (r"\sin^2(x)+\cos^2(x)", "1"),
    (r"\frac{\pi}{2}", "1.5707963"),
    (r"\frac13", "0.333333"),
    ("1024", "2^{10}"),
    ("120", "5!"),
    ("252", r"\binom{10}{5}"),
    ("A", "A"),
    ("Tuesday", r"\text{Tuesday}"),
    ("(1,2)", "$(1,2)$"),
    ("1,2", "2,1"),
    ("1,2", r"\{2, 1\}"),
    ("1<x<2", "(1,2)"),
    (r"(-\infty,3]\cup[5,\infty)", r"[5,\infty) \cup (-\infty,3]"),
    (r"2\pm\sqrt{3}", r"2-\sqrt{3}, 2+\sqrt{3}"),
    ("x=5", "5"),
    ("5", "x=5"),
    ("y=2x+1", "y=1+2x"),
    ("y=2x+1", "2x-y+1=0"),
    ("10", r"10\text{ cm}"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&2\\3&4.0\end{bmatrix}"),
    (r"\int_0^1 x^2 dx", r"\int_0^1 x^2 dx"),
    ("9" * 5000, "9" * 5000),
]
DIFFERENT = [
    ("1", r"\{1\}"),  # math-verify takes these for equal
    ("x=1,y=2", "1,2"),
    ("1,2", "x=1,y=2"),
    ("x=1,y=2", "2,1"),
    ("(1,2)", r"\{1,2\}"),
    ("46", "12 34"),
    ("3", "1 2"),
    (r"\frac13", "0.33"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("100000", "1e6"),
    ("x+1", "y+1"),
    ("y=2x+1", "y=2x+2"),
    ("3", r"\int_0^3 1 dx"),  # the work is left to the reader
    ("6", r"\sum_{n=1}^{3} n"),
    ("1", "9" * 3000),
    ("1", r"2^{2^{99}}"),
    ("7", ""),
    ("7", r"\frac{"),
]


@pytest.fixture(scope="module")
def verifier() -> MathVerifier:
    return MathVerifier()


def grade(verifier: MathVerifier, reference: str, text: str) -> float | None:
    prompt = Prompt(id="p", token_ids=(), answer=reference, task="math")
    verdict = verifier.grade(prompt, text)
    assert verdict.reward == verdict.correctness
    return verdict.reward


@pytest.mark.parametrize(("reference", "answer"), EQUAL)
def test_equal_values_are_correct(verifier: MathVerifier, reference: str, answer: str) -> None:
    assert grade(verifier, reference, rf"So it is \boxed{{{answer}}}.") == 1
    assert grade(verifier, rf"\boxed{{{reference}}}", rf"\boxed{{{answer}}}") == 1


@pytest.mark.parametrize(("reference", "answer"), DIFFERENT)
def test_different_values_are_incorrect(
    verifier: MathVerifier, reference: str, answer: str
) -> None:
    assert grade(verifier, reference, rf"So it is \boxed{{{answer}}}.") == 0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{1} and then \boxed{\frac{1}{2}}, QED 7", r"\frac{1}{2}"),
        (r"\boxed{1", None),
        ("The answer is 5.\nThe final answer is $x+1$. I hope it is correct.", "x+1"),
        ("**Answer:** 1/2", "1/2"),
        ("Answer: (3, 4)", "(3, 4)"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("First 1, then 2.\nSo they have 12 apples.", "12"),
        (r"Hence \(x = 3\) and \(y = 4\).", "y = 4"),
        ("", None),
        ("answer is", None),
        ("x" * 3000, None),
    ],
)
def test_final_answer_of_a_response(verifier: MathVerifier, text: str, answer: str | None) -> None:
    prompt = Prompt(id="p", token_ids=(), answer="-1", task="math")
    assert verifier.grade(prompt, text).answer == answer


FRACTIONS = st.fractions(min_value=-1000, max_value=1000, max_denominator=200)


@settings(max_examples=60, deadline=None)
@given(FRACTIONS, FRACTIONS)
def test_fractions_compare_as_numbers(value: Fraction, other: Fraction) -> None:
    def latex(number: Fraction, factor: int) -> str:
        sign = "-" if number < 0 else ""
        return rf"{sign}\frac{{{abs(number.numerator) * factor}}}{{{number.denominator * factor}}}"

    verifier = MathVerifier()
    for factor in (1, 6):
        answer = rf"\boxed{{{latex(other, factor)}}}"
        assert grade(verifier, latex(value, 1), answer) == (value == other)
    assert grade(verifier, str(value), rf"\boxed{{{latex(value, 3)}}}") == 1


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=r"\{}()[]|,=<>^_!$%&0159abxyze .+-*/fracsqrtpi", max_size=60))
def test_any_text_has_the_same_verdict_twice(text: str) -> None:
    verifier = MathVerifier()
    response = rf"\boxed{{{text}}}"
    first = grade(verifier, "42", response)
    assert first == grade(verifier, "42", response)
    assert first == 0 or "42" in re.sub(r"[^0-9]", "", text) or first is not None


def test_only_a_response_that_ended_by_itself_is_correct(verifier: MathVerifier) -> None:
    prompt = Prompt(id="p", token_ids=(), answer="1", task="math")

    async def score(finish_reason: FinishReason) -> float | None:
        return (await verifier.score(prompt, r"\boxed{1.0}", finish_reason)).reward

    assert asyncio.run(score(FinishReason.STOP)) == 1
    assert asyncio.run(score(FinishReason.LENGTH)) == 0
    with pytest.raises(ValueError, match="aborted"):
        asyncio.run(score(FinishReason.ABORT))
    verifier.close()


def test_unusable_references_are_refused() -> None:
    scorer = open_scorer(RewardSettings(name="math"))
    assert isinstance(scorer, MathVerifier)
    scorer.check_answer(make_question(r"\frac{1}{2}"))
    scorer.check_answer(make_question("Tuesday"))
    for answer, problem in ((" ", "holds no answer"), ("9^{9^{999}}", "longer, deeper or larger")):
        with pytest.raises(ValueError, match=rf"reference answer .*{problem}.*remove the row"):
            scorer.check_answer(make_question(answer))


FORMS = [
    (r"\frac{%d}{7}", r"%d \cdot 7^{-1}"),
    (r"%d\sqrt{3}", r"\frac{%d \cdot 3}{\sqrt{3}}"),
    ("x^2+%dx", "x(x+%d)"),
    ("(%d, 5)", "(%d.0, 5)"),
    (r"\{%d, 1\}", r"1, %d"),
    (r"%d\pi", r"2\pi\frac{%d}{2}"),
]


def answers(start: int, count: int) -> list[tuple[str, str]]:
    """Return references and responses in other forms, half of them correct."""
    return [
        (reference % number, rf"so \boxed{{{answer.replace('%d', str(number + number % 2))}}}")
        for number in range(start, start + count)
        for reference, answer in [FORMS[number // 2 % len(FORMS)]]
    ]


async def score_all(verifier: MathVerifier, pairs: list[tuple[str, str]]) -> list[float | None]:
    verdicts = []
    for reference, text in pairs:
        prompt = Prompt(id="p", token_ids=(1,) * 100, answer=reference, task="math")
        verdicts.append((await verifier.score(prompt, text, FinishReason.STOP)).reward)
    return verdicts


@pytest.mark.slow
def test_a_worker_costs_less_than_a_fifth(verifier: MathVerifier) -> None:
    """Rounds with and without a worker alternate, so that other load meets both."""
    seconds = {"worker": 0.0, "direct": 0.0}
    asyncio.run(score_all(verifier, answers(1, 20)))
    for round_number in range(4):
        pairs = answers(100 + 200 * round_number, 200)
        start = time.monotonic()
        direct = [grade(verifier, *pair) for pair in pairs]
        middle = time.monotonic()
        in_worker = asyncio.run(score_all(verifier, pairs))
        seconds["direct"] += middle - start
        seconds["worker"] += time.monotonic() - middle
        assert in_worker == direct and set(direct) == {0.0, 1.0}
    verifier.close()
    ratio = seconds["direct"] / seconds["worker"]
    rate = 800 / seconds["worker"]
    print(f"math in a worker: {ratio:.2f} of the speed without one, {rate:.0f} answers a second")
    assert ratio >= 0.8


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_memory_of_a_worker_stays_flat(verifier: MathVerifier) -> None:
    sizes = []

    async def run() -> None:
        for chunk in range(20):
            await score_all(verifier, answers(500 * chunk + 1, 500))
            children = psutil.Process(os.getpid()).children()
            sizes.append(max(child.memory_info().rss for child in children) >> 20)

    asyncio.run(run())
    verifier.close()
    print(f"memory of the worker after each 500 of 10,000 calls: {sizes} MiB")
    assert max(sizes) - min(sizes) <= 40
