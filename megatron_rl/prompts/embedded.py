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
    """questions: from a seed to a stream of questions with worked responses. num_train: how many recipes train on.

    capacity: None for a task with more questions than any run asks for.
    """

    questions: Callable[[int], Iterator[Question]]
    num_train: int
    capacity: Capacity | None = None


EMBEDDED: Mapping[str, EmbeddedTask] = {
    column_addition.NAME: EmbeddedTask(column_addition.questions, num_train=24_000),
    two_digit_addition.NAME: EmbeddedTask(
        two_digit_addition.questions, num_train=8_000, capacity=Capacity(8_785, 1_215)
    ),
}
