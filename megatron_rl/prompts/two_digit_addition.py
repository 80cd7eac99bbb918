"""Addition of two numbers from 0 to 99 in a four-token response: the embedded task of smoke tests.

12+34=   ->   046
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from megatron_rl.prompts.question import Question

NAME = "two_digit_addition"


def questions(seed: int) -> Iterator[Question]:
    """All 10,000 questions, shuffled."""
    pairs = [(a, b) for a in range(100) for b in range(100)]
    random.Random(f"{NAME}/{seed}").shuffle(pairs)
    for a, b in pairs:
        yield question(a, b)


def question(a: int, b: int) -> Question:
    """The question for two numbers, with its answer padded to three digits."""
    text = f"{a:02d}+{b:02d}="
    answer = f"{a + b:03d}"
    return Question(
        id=f"{NAME}/{text}",
        text=text,
        answer=answer,
        task=NAME,
        identity=f"{NAME}/{min(a, b)}+{max(a, b)}",
        difficulty="3_digits" if a + b >= 100 else "2_digits" if a + b >= 10 else "1_digit",
        demonstration=answer,
    )
