"""Column addition with three difficulties in equal parts.

    easy    4 digits, with all column sums in the question, so that only the total is missing
    middle  5 digits, all of them from 1 to 6
    hard    6 digits. Every column carries, and three columns with an incoming carry are 9 + 9

The shipped checkpoint of column addition solves an easy question at least 95 %, a middle one 20 to
70 % and a hard one at most 2 % of the time (docs/data.md;
tests/prompts/test_column_addition_mixed.py). Both tasks share identities, so a question that is
held out here is held out of `column_addition`, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts import column_addition

NAME = "column_addition_mixed"
Columns = list[tuple[int, int]]


def questions(seed: int) -> Iterator[Question]:
    """Yield questions endlessly in threes, one of each difficulty in random order."""
    rng = random.Random(f"{NAME}/{seed}")
    generators = [_easy, _middle, _hard]
    while True:
        rng.shuffle(generators)
        for generate in generators:
            yield generate(rng)


def question(columns: Columns, *, num_sums: int = 0) -> Question:
    """Make a question of digit pairs.

    columns: digit pairs from the right.
    num_sums: number of columns, from the right, whose sums are part of the question.
    """
    plain = column_addition.question(columns)
    sums = plain.demonstration[: 3 * num_sums]  # a letter and two digits for each column
    text = plain.text + sums
    return replace(
        plain,
        id=f"{NAME}/{text}",
        text=text,
        task=NAME,
        difficulty=f"{len(columns)}_digits_{_carries(columns)}_carries",
        demonstration=plain.demonstration.removeprefix(sums),
    )


def _easy(rng: random.Random) -> Question:
    columns = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(3)]
    columns.append((rng.randint(1, 9), rng.randint(1, 9)))
    return question(columns, num_sums=4)


def _middle(rng: random.Random) -> Question:
    return question([(rng.randint(1, 6), rng.randint(1, 6)) for _ in range(5)])


def _hard(rng: random.Random) -> Question:
    columns = [_carrying_column(rng) for _ in range(6)]
    for index in rng.sample(range(1, 6), k=3):
        columns[index] = (9, 9)
    return question(columns)


def _carrying_column(rng: random.Random) -> tuple[int, int]:
    """Sample one of the 45 pairs whose sum is 10 or more, all equally likely."""
    first = rng.choices(range(1, 10), weights=range(1, 10))[0]
    return first, rng.randint(10 - first, 9)


def _carries(columns: Columns) -> int:
    count = carry = 0
    for a, b in columns:
        carry = (a + b + carry) // 10
        count += carry
    return count
