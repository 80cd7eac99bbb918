"""A user-defined prompt source: products of two numbers.

With this folder on PYTHONPATH: data.source=my_source:Products data.options='{digits: 3}'
"""

import random
from collections.abc import Iterator

from megatron_rl.contracts.prompt import Question


class Products:
    """Asks `12*34=`, with the answer 408. Both numbers have at most `digits` digits."""

    def __init__(self, digits: int = 2) -> None:
        if not 1 <= digits <= 9:
            raise ValueError("digits must be from 1 to 9")
        self.largest = 10**digits - 1

    def questions(self, seed: int) -> Iterator[Question]:
        rng = random.Random(seed)
        while True:
            a = rng.randint(0, self.largest)
            b = rng.randint(0, self.largest)
            text = f"{a}*{b}="
            product = str(a * b)
            yield Question(
                id=f"products/{text}",
                text=text,
                answer=product,
                task="products",
                difficulty=f"{len(product)}_digits",
                # `a*b` and `b*a` stay on the same side of the held-out split.
                identity=f"products/{min(a, b)}*{max(a, b)}",
                demonstration=product,  # used by environment.name=demonstration
            )
