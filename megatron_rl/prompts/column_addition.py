"""Column addition with all steps written out: the embedded task of the quickstart.

A question gives two numbers of n digits (n = 4, 5 or 6) by columns, from the right, each column
after a letter. The response writes each column's sum, including the carry, with two digits, then
the total with n + 1 digits:

    a38b13c65d18e97=   ->   a11b05c11d10e17>170151        (91613 + 78538 = 170151)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from megatron_rl.contracts.prompt import Question

NAME = "column_addition"
LETTERS = "abcdef"
NUM_DIGITS = (4, 5, 6)


def questions(seed: int) -> Iterator[Question]:
    """Yield questions endlessly.

    The number of digits is sampled uniformly, then the digits, the leading ones from 1 to 9.
    """
    rng = random.Random(f"{NAME}/{seed}")
    digits = range(10)
    while True:
        n = rng.choice(NUM_DIGITS)
        lower = rng.choices(digits, k=2 * n - 2)
        columns = list(zip(lower[::2], lower[1::2], strict=True))
        columns.append((rng.randint(1, 9), rng.randint(1, 9)))
        yield question(columns)


def question(columns: Sequence[tuple[int, int]]) -> Question:
    """Make a question of digit pairs, with its answer and its demonstration.

    columns: digit pairs from the right.
    """
    terms = []
    sums = []
    total_digits = []
    carry = 0
    for letter, (a, b) in zip(LETTERS, columns, strict=False):
        column_sum = a + b + carry
        terms.append(f"{letter}{a}{b}")
        sums.append(f"{letter}{column_sum:02d}")
        total_digits.append(str(column_sum % 10))
        carry = column_sum // 10
    text = "".join(terms) + "="
    answer = str(carry) + "".join(reversed(total_digits))
    sorted_columns = sorted((min(column), max(column)) for column in columns)
    return Question(
        id=f"{NAME}/{text}",
        text=text,
        answer=answer,
        task=NAME,
        identity=f"{NAME}/{sorted_columns}",
        difficulty=f"{len(columns)}_digits",
        demonstration=f"{''.join(sums)}>{answer}",
    )
