"""Column addition with its working written out: the embedded task of the quickstart.

Two numbers of n digits (n = 4, 5 or 6) are given by columns from the right, each column under a
letter. The response writes each column's sum with the carry into it, in two digits, then the total
with n + 1 digits:

    a38b13c65d18e97=   ->   a11b05c11d10e17>170151        (91613 + 78538 = 170151)
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from megatron_rl.prompts.question import Question

NAME = "column_addition"
LETTERS = "abcdef"
NUM_DIGITS = (4, 5, 6)


def questions(seed: int) -> Iterator[Question]:
    """An endless stream; the number of digits is drawn uniformly, then the digits (the leading ones
    from 1 to 9).
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
    """The question for digit pairs given from the right, with its answer and its worked response."""
    text = (
        "".join(f"{letter}{a}{b}" for letter, (a, b) in zip(LETTERS, columns, strict=False)) + "="
    )
    working, total, carry = [], [], 0
    for letter, (a, b) in zip(LETTERS, columns, strict=False):
        column_sum = a + b + carry
        working.append(f"{letter}{column_sum:02d}")
        total.append(str(column_sum % 10))
        carry = column_sum // 10
    answer = str(carry) + "".join(reversed(total))
    return Question(
        id=f"{NAME}/{text}",
        text=text,
        answer=answer,
        task=NAME,
        identity=f"{NAME}/{sorted((min(c), max(c)) for c in columns)}",
        difficulty=f"{len(columns)}_digits",
        demonstration=f"{''.join(working)}>{answer}",
    )
