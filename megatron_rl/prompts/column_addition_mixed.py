"""Column addition of three difficulties in equal parts: what a start policy can do, can do
sometimes, and cannot do.

    easy    4 digits with every column worked in the question, so that only the total is left
    middle  5 digits, all of them from 1 to 6
    hard    6 digits, every column carries, and three columns with a carry into them are 9 + 9

The shipped checkpoint of column addition solves a question of them at least 95 %, 20 to 70 % and at
most 2 % of the time (docs/data.md; tests/prompts/test_column_addition_mixed.py). A question that is
held out here is held out of `column_addition` too: they share identities.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.prompts import column_addition
from megatron_rl.prompts.question import Question

NAME = "column_addition_mixed"
Columns = list[tuple[int, int]]


def questions(seed: int) -> Iterator[Question]:
    """An endless stream in threes, one of each difficulty in a drawn order."""
    rng = random.Random(f"{NAME}/{seed}")
    kinds = [_easy, _middle, _hard]
    while True:
        rng.shuffle(kinds)
        for kind in kinds:
            yield kind(rng)


def question(columns: Columns, *, worked_columns: int = 0) -> Question:
    """The question for digit pairs given from the right, the first `worked_columns` of them worked
    in its text.
    """
    plain = column_addition.question(columns)
    shown = plain.demonstration[: 3 * worked_columns]  # a letter and two digits of each
    text = plain.text + shown
    return replace(
        plain,
        id=f"{NAME}/{text}",
        text=text,
        task=NAME,
        difficulty=f"{len(columns)}_digits_{_carries(columns)}_carries",
        demonstration=plain.demonstration.removeprefix(shown),
    )


def _easy(rng: random.Random) -> Question:
    columns = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(3)]
    return question([*columns, (rng.randint(1, 9), rng.randint(1, 9))], worked_columns=4)


def _middle(rng: random.Random) -> Question:
    return question([(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(5)])


def _hard(rng: random.Random) -> Question:
    columns = [_with_a_carry(rng) for _ in range(6)]
    for place in rng.sample(range(1, 6), k=3):
        columns[place] = (9, 9)
    return question(columns)


def _with_a_carry(rng: random.Random) -> tuple[int, int]:
    first = rng.choices(range(1, 10), weights=range(1, 10))[
        0
    ]  # evenly among the 45 pairs that add up to 10 or more
    return first, rng.randint(10 - first, 9)


def _carries(columns: Columns) -> int:
    count = carry = 0
    for a, b in columns:
        carry = (a + b + carry) // 10
        count += carry
    return count
