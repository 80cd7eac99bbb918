"""Column addition with a calculator: the questions of `column_addition`, worked out with its calls.

The response asks for the sum of each column with the carry into it, and then writes the total. The
calculator (`environment=calculator`) adds the results, here in brackets:

    a38b13c65=   ->   a3+8=[11]b1+3+1=[05]c6+5+0=[11]>1151        (613 + 538 = 1151)

A question that is held out of `column_addition` is held out of this task, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from megatron_rl.contracts.prompt import Question
from megatron_rl.prompts import column_addition

NAME = "column_addition_calls"
_COLUMN = re.compile(r"([a-f])(\d)(\d)")


def questions(seed: int) -> Iterator[Question]:
    """Yield questions endlessly."""
    for question in column_addition.questions(seed):
        yield replace(
            question,
            id=f"{NAME}/{question.text}",
            task=NAME,
            demonstration=f"{calls_of(question.text)}>{question.answer}",
        )


def calls_of(question: str) -> str:
    """Return the calls for a question, each with its result."""
    calls = []
    carry = ""
    for letter, first, second in _COLUMN.findall(question):
        column_sum = int(first) + int(second) + int(carry or 0)
        calls.append(f"{letter}{first}+{second}{f'+{carry}' if carry else ''}={column_sum:02d}")
        carry = str(column_sum // 10)
    return "".join(calls)
