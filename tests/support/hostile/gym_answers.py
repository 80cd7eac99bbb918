"""Answers to tasks of reasoning-gym that its scores would execute, or that take long."""

from __future__ import annotations

import json
from itertools import islice

from megatron_rl.prompts.gym import ReasoningGym
from tests.support.hostile.cases import HostileCases, make_prompt

_TASKS = (
    "string_insertion",
    "spiral_matrix",
    "binary_matrix",
    "n_queens",
    "countdown",
    "puzzle24",
    "simple_integration",
    "intermediate_integration",
    "polynomial_multiplication",
    "coin_flip",
    "rubiks_cube",
    "decimal_arithmetic",
)
_TOUCH = "__import__('os').system('touch escaped')"
_ANSWERS = [
    _TOUCH,
    f"[{_TOUCH}]",
    f"{_TOUCH} or 24",
    f"x + {_TOUCH}",
    'open("escaped", "w")',
    "[open('escaped', 'w')]",
    "exec('import os')",
    "eval('1+1')",
    "print(1)",
    "exit()",
    "quit()",
    "[x for x in (1).__class__.__base__.__subclasses__()]",
    "().__class__.__mro__",
    "(lambda: open('escaped', 'w'))()",
    "lambda x: x",
    "x.func(1)",
    "x.__class__",
    "getattr(x, 'func')",
    "S('open(1)')",
    "sympify('1')",
    "Symbol('x')",
    "Function('f')(x)",
    "factorial(99999999)",
    "99999999!",
    "9**9**9**9",
    "9**(9**(9**9))",
    "((9**99)**99)**99",
    "(((((9**99)**99)**99)**99)**99)",
    "x**999999999",
    "(x+1)**99999",
    "(x+1)**99",
    "((x+1)**99)**99",
    "(x+y+z+a+b+c)**60",
    "2**x**x**x",
    "10*" * 100 + "10",
    "9" * 100_000,
    "9" * 3_000_000,
    "1/" * 100_000 + "1",
    "-" * 100_000 + "1",
    "(" * 100_000,
    "(" * 150 + "1" + ")" * 150,
    "[" * 100_000,
    "[" * 4000 + "]" * 4000,
    "[" * 90 + "]" * 90,
    "1e999999999",
    "1/1e999999999",
    "0." + "1" * 9000,
    "1e99",
    "1E+99999",
    "nan",
    "inf",
    "-inf",
    "1/0",
    "0**-1",
    "R U " * 2000,
    "R' U2 F " * 300_000,
    "sin(" * 60 + "x" + ")" * 60,
    "exp(" * 60 + "x" + ")" * 60,
    "sqrt(" * 30 + "x+1" + ")" * 30,
    "sin(x)**40*cos(x)**40",
    "log(log(log(log(x))))*tan(tan(tan(x)))",
    "Integral(exp(exp(x)), x)",
    "Sum(x, (x, 1, 9999999))",
    "\x00" * 1000,
    "\u0661\u0662",
    "\ud7ff" * 1000,
    " " * 1_000_000,
    "",
]


def make_cases() -> HostileCases:
    """Return the cases. They need reasoning-gym."""
    questions = [next(islice(ReasoningGym({"task": task}).questions(0), 1)) for task in _TASKS]
    answers = [json.loads(question.details)["answer"] for question in questions]
    return HostileCases(
        name="reasoning_gym",
        options={},
        prompts=[make_prompt("", question.details) for question in questions],
        responses=[f"<answer>{answer}</answer>" for answer in _ANSWERS],
        ordinary=[f"So <answer>{answer}</answer>" for answer in answers[:8]],
    )
