import re
from collections import Counter
from itertools import islice

import pytest

from megatron_rl.prompts import column_addition, column_addition_mixed
from megatron_rl.prompts.split import split_generator
from tests.lab.start_policy import StartPolicy, questions_by_digits, summarize


def test_question_with_two_sums_by_hand() -> None:
    # 5613 + 8538 = 14151; from the right 3+8, 1+3+1, 6+5, 5+8+1
    question = column_addition_mixed.question([(3, 8), (1, 3), (6, 5), (5, 8)], num_sums=2)
    assert question.text == "a38b13c65d58=a11b05"
    assert question.demonstration == "c11d14>14151"
    assert question.answer == "14151"
    assert (question.difficulty, question.task) == ("4_digits_3_carries", "column_addition_mixed")


def test_every_question_agrees_with_its_text() -> None:
    labels = set()
    for question in islice(column_addition_mixed.questions(seed=3), 3000):
        terms, sums = question.text.split("=")
        columns = re.findall(r"([a-f])(\d)(\d)", terms)
        first = int("".join(column[1] for column in reversed(columns)))
        second = int("".join(column[2] for column in reversed(columns)))
        assert int(question.answer) == first + second
        assert len(question.text) <= 32
        plain = column_addition.question([(int(a), int(b)) for _, a, b in columns])
        assert plain.demonstration == sums + question.demonstration
        assert plain.identity == question.identity
        labels.add(question.difficulty)
    rare_label = "5_digits_5_carries"
    expected_labels = {f"{digits}_digits_{n}_carries" for digits in (4, 5) for n in range(5)}
    assert labels - {rare_label} == expected_labels | {"6_digits_6_carries"}


@pytest.mark.slow
def test_both_sides_of_the_split_have_a_third_of_each_difficulty() -> None:
    split = split_generator(column_addition_mixed.questions(0), 24_000, 1024)
    for side in (split.train, split.held_out):
        counts = Counter(question.difficulty[0] for question in side)
        assert [counts[digits] / len(side) for digits in "456"] == pytest.approx(
            [1 / 3] * 3, abs=0.04
        )
        assert len({question.id for question in side}) == len(side)


def columns_of(num_digits: int) -> list[list[tuple[int, int]]]:
    """Digit pairs, from the right, of the questions with so many digits among the first 9000."""
    columns = []
    for question in islice(column_addition_mixed.questions(seed=5), 9000):
        terms = question.text.partition("=")[0]
        pairs = [(int(a), int(b)) for a, b in re.findall(r"[a-f](\d)(\d)", terms)]
        if len(pairs) == num_digits:
            columns.append(pairs)
    return columns


@pytest.mark.slow
def test_easy_and_middle_questions_have_all_their_digits() -> None:
    for num_digits, digits, leading_digits in (
        (4, set(range(10)), set(range(1, 10))),
        (5, set(range(1, 7)), set(range(1, 7))),
    ):
        columns = columns_of(num_digits)
        assert len(columns) == 3000
        for side in (0, 1):
            *others, leading = ({pairs[i][side] for pairs in columns} for i in range(num_digits))
            assert leading == leading_digits
            assert others == [digits] * (num_digits - 1)


@pytest.mark.slow
def test_hard_questions_have_three_columns_of_nines_after_the_first() -> None:
    """Other columns are one of 45 pairs, all equally likely."""
    columns = columns_of(6)
    shares = [sum(pairs[i] == (9, 9) for pairs in columns) / 3000 for i in range(6)]
    assert shares == pytest.approx([1 / 45, *[3 / 5 + 2 / 5 / 45] * 5], abs=0.03)
    counts = Counter(pairs[0] for pairs in columns)
    assert set(counts) == {(a, b) for a in range(1, 10) for b in range(10 - a, 10)}
    first_digits = Counter(pairs[0][0] for pairs in columns)
    assert [first_digits[a] / 3000 for a in range(1, 10)] == pytest.approx(
        [a / 45 for a in range(1, 10)], abs=0.03
    )


@pytest.mark.nightly
def test_pass_rates_of_the_shipped_checkpoint_by_difficulty() -> None:
    policy = StartPolicy(seed=0)
    rates = {
        digits: policy.pass_rates(questions, 64)
        for digits, questions in questions_by_digits(24).items()
    }
    easy, middle, hard = (summarize(rates[digits]) for digits in (4, 5, 6))
    # With 64 samples, a rate of 0.967 is measured as 0.95 or more with a probability of 80 %.
    assert easy[0] >= 0.95, easy
    assert easy[1] >= 0.7, easy
    assert 0.35 <= middle[0] <= 0.55, middle
    assert middle[2] >= 0.8, middle
    assert hard[0] <= 0.02, hard
    assert hard[3] >= 0.8, hard
