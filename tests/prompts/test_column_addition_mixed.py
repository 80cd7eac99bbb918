import re
from collections import Counter
from itertools import islice

import pytest

from launch.studies.start_policy import StartPolicy, by_length, shares
from megatron_rl.prompts import column_addition, column_addition_mixed
from megatron_rl.prompts.split import draw_split


def test_a_question_with_two_worked_columns_by_hand() -> None:
    # 5613 + 8538 = 14151; from the right 3+8, 1+3+1, 6+5, 5+8+1
    question = column_addition_mixed.question([(3, 8), (1, 3), (6, 5), (5, 8)], worked_columns=2)
    assert question.text == "a38b13c65d58=a11b05"
    assert question.demonstration == "c11d14>14151"
    assert question.answer == "14151"
    assert (question.difficulty, question.task) == ("4_digits_3_carries", "column_addition_mixed")


def test_every_question_is_what_its_text_says() -> None:
    labels = set()
    for question in islice(column_addition_mixed.questions(seed=3), 3000):
        asked, shown = question.text.split("=")
        columns = re.findall(r"([a-f])(\d)(\d)", asked)
        first, second = (int("".join(c[i] for c in reversed(columns))) for i in (1, 2))
        assert int(question.answer) == first + second
        assert (shown + question.demonstration).endswith(f">{question.answer}") and len(
            question.text
        ) <= 32
        plain = column_addition.question([(int(a), int(b)) for _, a, b in columns])
        assert plain.demonstration == shown + question.demonstration
        assert question.identity == plain.identity, "held out here, held out of column_addition too"
        labels.add(question.difficulty)
    four, five = ({f"{digits}_digits_{n}_carries" for n in range(5)} for digits in (4, 5))
    assert labels | {"5_digits_5_carries"} == {
        *four,
        *five,
        "5_digits_5_carries",
        "6_digits_6_carries",
    }, "one is rare"


def test_both_sides_of_the_split_hold_a_third_of_each_difficulty() -> None:
    split = draw_split(column_addition_mixed.questions(0), 24_000, 1024)
    for side in (split.train, split.held_out):
        counts = Counter(question.difficulty[0] for question in side)
        assert [counts[digits] / len(side) for digits in "456"] == pytest.approx(
            [1 / 3] * 3, abs=0.04
        )
        assert len({question.id for question in side}) == len(side)


def test_the_start_policy_solves_a_third_nearly_always_a_third_sometimes_and_a_third_almost_never() -> (
    None
):
    policy = StartPolicy(seed=0)
    rates = {
        digits: policy.pass_rates(questions, 64) for digits, questions in by_length(24).items()
    }
    easy, middle, hard = (shares(rates[digits]) for digits in (4, 5, 6))
    assert easy[0] >= 0.95 and easy[1] >= 0.7, (
        easy
    )  # 64 samples each: a rate of 0.967 shows as 0.95 and above in 80 %
    assert 0.35 <= middle[0] <= 0.55 and middle[2] >= 0.8, middle
    assert hard[0] <= 0.02 and hard[3] >= 0.8, hard
