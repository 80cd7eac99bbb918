import re
from itertools import islice

import pytest

from megatron_rl.prompts import column_addition


def test_the_example_by_hand() -> None:
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


def test_every_question_is_what_its_text_says() -> None:
    lengths = set()
    for question in islice(column_addition.questions(seed=3), 2000):
        columns = re.findall(r"([a-f])(\d)(\d)", question.text)
        assert "".join(map("".join, columns)) + "=" == question.text
        assert "".join(letter for letter, _, _ in columns) == "abcdef"[: len(columns)]
        first, second = (int("".join(c[i] for c in reversed(columns))) for i in (1, 2))
        assert min(first, second) >= 10 ** (len(columns) - 1), "the leading digits are not zero"
        assert int(question.answer) == first + second
        assert len(question.answer) == len(columns) + 1
        assert question.difficulty == f"{len(columns)}_digits"
        lengths.add(len(question.demonstration) + 1)  # the end-of-sequence token
    assert lengths == {19, 23, 27}


@pytest.mark.parametrize(
    "columns",
    [
        [(1, 3), (3, 8), (6, 5), (9, 7)],  # another order
        [(8, 3), (1, 3), (5, 6), (9, 7)],  # digits exchanged within columns
    ],
)
def test_the_same_columns_have_one_identity(columns: list[tuple[int, int]]) -> None:
    question = column_addition.question([(3, 8), (1, 3), (6, 5), (9, 7)])
    assert column_addition.question(columns).identity == question.identity
    assert column_addition.question(columns).text != question.text


def test_other_columns_have_another_identity() -> None:
    once = column_addition.question([(3, 8), (1, 3), (6, 5), (9, 7)])
    twice = column_addition.question([(3, 8), (3, 8), (6, 5), (9, 7)])
    assert once.identity != twice.identity


def test_digit_counts_are_drawn_evenly_and_seeds_differ() -> None:
    first = list(islice(column_addition.questions(0), 3000))
    shares = [
        sum(q.difficulty == f"{n}_digits" for q in first) / 3000 for n in column_addition.NUM_DIGITS
    ]
    assert shares == pytest.approx([1 / 3] * 3, abs=0.04)
    assert [q.text for q in islice(column_addition.questions(0), 20)] == [
        q.text for q in first[:20]
    ]
    assert [q.text for q in islice(column_addition.questions(1), 20)] != [
        q.text for q in first[:20]
    ]
