"""The embedded tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron_rl.prompts import column_addition, two_digit_addition
from megatron_rl.prompts.question import Question


@dataclass(frozen=True)
class Capacity:
    """How many different questions a finite task has on each side of its split, whatever the seed."""

    train: int
    held_out: int


@dataclass(frozen=True)
class EmbeddedTask:
    """A `Source` that comes with the program. capacity: None for more questions than any run asks for."""

    questions: Callable[[int], Iterator[Question]]
    capacity: Capacity | None = None


EMBEDDED: Mapping[str, EmbeddedTask] = {
    column_addition.NAME: EmbeddedTask(column_addition.questions),
    two_digit_addition.NAME: EmbeddedTask(two_digit_addition.questions, Capacity(8_785, 1_215)),
}
