"""Sorting letters: an embedded task that is no arithmetic.

A question gives 5 to 8 letters, which may repeat. The response gives them in alphabetical order:

    qbxxa=   ->   abqxx

Score it with reward.answer=last_line.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from string import ascii_lowercase

from megatron_rl.contracts.prompt import Question

NAME = "letter_sorting"
NUM_LETTERS = (5, 6, 7, 8)


def questions(seed: int) -> Iterator[Question]:
    """Yield questions endlessly. The number of letters is sampled uniformly, then the letters."""
    rng = random.Random(f"{NAME}/{seed}")
    while True:
        yield question("".join(rng.choices(ascii_lowercase, k=rng.choice(NUM_LETTERS))))


def question(letters: str) -> Question:
    """Make the question of some letters. All orders of the same letters have one identity."""
    text = f"{letters}="
    answer = "".join(sorted(letters))
    return Question(
        id=f"{NAME}/{text}",
        text=text,
        answer=answer,
        task=NAME,
        identity=f"{NAME}/{answer}",
        difficulty=f"{len(letters)}_letters",
        demonstration=answer,
    )
