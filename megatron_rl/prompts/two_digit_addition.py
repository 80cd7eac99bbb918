"""Addition of two numbers from 0 to 99 with a four-token response: the task of smoke tests.

12+34=   ->   046
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from megatron_rl.contracts.prompt import Question

NAME = "two_digit_addition"


def questions(seed: int) -> Iterator[Question]:
    """Yield all 10,000 questions, shuffled."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(f"{NAME}/{seed}").shuffle(pairs)
    for a, b in pairs:
        yield question(a, b)


def question(a: int, b: int) -> Question:
    """Make the question of two numbers. Its answer is padded to three digits."""
    text = f"{a:02d}+{b:02d}="
    answer = f"{a + b:03d}"
    num_digits = len(str(a + b))
    return Question(
        id=f"{NAME}/{text}",
        text=text,
        answer=answer,
        task=NAME,
        identity=f"{NAME}/{min(a, b)}+{max(a, b)}",
        difficulty="1_digit" if num_digits == 1 else f"{num_digits}_digits",
        demonstration=answer,
    )
