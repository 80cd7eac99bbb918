import re
from itertools import islice

import pytest

from megatron_rl.prompts import column_addition


def test_question_by_hand() -> None:
    # 91613 + 78538 = 170151; from the right 3+8, 1+3, 6+5, 1+8, 9+7 with carries 0, 1, 0, 1, 1
    question = column_addition.question([(3, 8), (1, 3), (6, 5), (1, 8), (9, 7)])
    assert question.text == "a38b13c65d18e97="
    assert question.demonstration == "a11b05c11d10e17>170151"
    assert question.answer == "170151"
    assert question.difficulty == "5_digits"


def test_a_total_without_final_carry_keeps_its_length() -> None:
    # 2001 + 1002 = 3003
    question = column_addition.question([(1, 2), (0, 0), (0, 0), (2, 1)])
    assert question.demonstration == "a03b00c00d03>03003"


def test_every_question_agrees_with_its_text() -> None:
    lengths = set()
    for question in islice(column_addition.questions(seed=3), 2000):
        columns = re.findall(r"([a-f])(\d)(\d)", question.text)
        assert "".join(map("".join, columns)) + "=" == question.text
        assert "".join(letter for letter, _, _ in columns) == "abcdef"[: len(columns)]
        first = int("".join(column[1] for column in reversed(columns)))
        second = int("".join(column[2] for column in reversed(columns)))
        assert min(first, second) >= 10 ** (len(columns) - 1), "the leading digits are not zero"
        assert int(question.answer) == first + second
        assert len(question.answer) == len(columns) + 1
        assert question.difficulty == f"{len(columns)}_digits"
        lengths.add(len(question.demonstration) + 1)  # the end-of-sequence token
    assert lengths == {19, 23, 27}


@pytest.mark.parametrize(
    "columns",
    [
        [(1, 3), (3, 8), (6, 5), (9, 7)],  # in another order
        [(8, 3), (1, 3), (5, 6), (9, 7)],  # digits exchanged within columns
    ],
)
def test_equal_columns_have_one_identity(columns: list[tuple[int, int]]) -> None:
    question = column_addition.question([(3, 8), (1, 3), (6, 5), (9, 7)])
    assert column_addition.question(columns).identity == question.identity
    assert column_addition.question(columns).text != question.text


def test_different_columns_have_different_identities() -> None:
    once = column_addition.question([(3, 8), (1, 3), (6, 5), (9, 7)])
    twice = column_addition.question([(3, 8), (3, 8), (6, 5), (9, 7)])
    assert once.identity != twice.identity


def test_digit_counts_are_uniform_and_orders_depend_on_the_seed() -> None:
    questions = list(islice(column_addition.questions(0), 3000))
    difficulties = [question.difficulty for question in questions]
    shares = [difficulties.count(f"{n}_digits") / 3000 for n in column_addition.NUM_DIGITS]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)
    assert list(islice(column_addition.questions(0), 20)) == questions[:20]
    assert list(islice(column_addition.questions(1), 20)) != questions[:20]
