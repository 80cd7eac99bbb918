"""Judges programs by tests, which run in the sandbox. What the tests expect stays outside."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import msgspec

from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt, Question
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.sandbox import Ending, Limits, ProgramResult, Sandbox
from megatron_rl.rewards.scorer import Scorer

_FENCE = re.compile(r"( *)(`{3,}|~{3,})([^`]*)")
_RELATIVE_TOLERANCE = 1e-6
_ABSOLUTE_TOLERANCE = 1e-12

# Calls a function of the program on standard input, and prints its result. What the program prints
# goes nowhere. It could print a result itself: it would have to know the right one.
_CALL = """
import json, os, sys

def call():
    request = json.loads(sys.stdin.buffer.read())
    output = os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    module = type(sys)("solution")
    sys.modules["solution"] = module
    exec(compile(request["program"], "solution.py", "exec"), module.__dict__)
    result = getattr(module, request["function"])(*request["arguments"])
    with open(output, "w") as file:
        file.write(json.dumps(result))

call()
"""


class _Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test of a whole program: standard input, and standard output that it must write."""

    stdin: str
    stdout: str


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A test of a function: positional arguments, and the result."""

    arguments: list[Any]
    result: Any


class _Tests(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cases: list[_Case] = []
    function: str = ""
    calls: list[_Call] = []


class UnitTests(Scorer):
    """Rewards 1 for a program that passes all tests of a question, and 0 for any other.

    The program is the last block of code in the response, or the response without one. The tests
    are the question's `details`, as JSON:

        {"cases": [{"stdin": "1 2", "stdout": "3"}],
         "function": "add", "calls": [{"arguments": [1, 2], "result": 3}]}

    Each test runs in a sandbox of its own, so that a program sees one test at a time. Standard
    output must be equal but for white space at the ends of lines and of the text. Results must be
    equal as JSON; numbers with a fraction may differ by 1e-6 of their size.

    A program that meets a limit of processor time, memory or output fails this test and all that
    follow, always. One that meets the limit of the clock has no verdict.

    partial: reward the share of tests that passed. cpu_s, wall_s, memory_mb: limits of each
    test (`Limits`). sandbox: its mode.
    """

    def __init__(
        self,
        *,
        partial: bool = False,
        cpu_s: int = 5,
        wall_s: float = 60.0,
        memory_mb: int = 512,
        sandbox: Literal["strict", "weak"] = "strict",
    ) -> None:
        self._is_partial = partial
        limits = Limits(cpu_s=cpu_s, wall_s=wall_s, memory_mb=memory_mb)
        self._sandbox = Sandbox(limits, mode=sandbox)

    def check_answer(self, question: Question) -> None:
        """Raise ValueError for a question without valid tests in its details."""
        _read_tests(question.details)

    async def score(self, prompt: Prompt, text: str, finish_reason: FinishReason) -> Verdict:
        """Run the tests of a response. Only a response that ended by itself can be correct.

        Raises ValueError for an aborted response, TimeoutError for a program that waits beyond the
        limit of the clock, and RuntimeError if the sandbox fails.
        """
        if finish_reason is FinishReason.ABORT:
            raise ValueError("the response was aborted")
        if finish_reason is not FinishReason.STOP:
            return Verdict(reward=0.0, correctness=0.0)
        tests = _read_tests(prompt.details)
        program = find_program(text)
        passes = await self._count_passes(program, tests)
        share = passes / (len(tests.cases) + len(tests.calls))
        correctness = share if self._is_partial else float(share == 1.0)
        return Verdict(reward=correctness, correctness=correctness, answer=program)

    async def _count_passes(self, program: str, tests: _Tests) -> int:
        """Count the tests that a program passes before a limit ends it.

        A failure ends the count too, unless the share is wanted.
        """
        count = 0
        every: list[_Case | _Call] = [*tests.cases, *tests.calls]
        for test in every:
            result = await self._run(program, tests.function, test)
            if result.ending is Ending.CLOCK:
                raise TimeoutError("the program waited beyond the limit of the clock")
            is_limited = result.ending is not Ending.EXIT
            passes = not is_limited and _passes(test, result.output)
            count += passes
            if is_limited or not (passes or self._is_partial):
                break
        return count

    async def _run(self, program: str, function: str, test: _Case | _Call) -> ProgramResult:
        if isinstance(test, _Case):
            return await self._sandbox.run(program, test.stdin.encode())
        request = {"program": program, "function": function, "arguments": test.arguments}
        return await self._sandbox.run(_CALL, json.dumps(request).encode())


def find_program(text: str) -> str:
    """Return the last block of code in a response, the whole response if there is none.

    A block begins with a fence of at least three backticks or tildes. It ends with as many, or with
    the text.
    """
    block: list[str] | None = None
    fence = ""
    indent = 0
    program = text
    for line in text.split("\n"):
        match = _FENCE.fullmatch(line.rstrip())
        if block is None and match is not None:
            block = []
            fence = match[2]
            indent = len(match[1])
        elif block is not None and match is not None and not match[3] and fence in match[2]:
            program = _join(block)
            block = None
        elif block is not None:
            block.append(_outdent(line, indent))
    return program if block is None else _join(block)


def _join(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _outdent(line: str, indent: int) -> str:
    """Remove the indentation that a block in a list has."""
    return line[min(indent, len(line) - len(line.lstrip(" "))) :]


def _read_tests(details: str) -> _Tests:
    """Read the tests of a question. Raises ValueError."""
    try:
        tests = msgspec.convert(json.loads(details, parse_constant=_refuse_constant), _Tests)
        problem = next(_problems(tests), "")
    except RecursionError:
        problem = "they are nested too deeply"
    except ValueError as error:  # of JSON, and of msgspec
        problem = str(error)
    if problem:
        raise ValueError(
            f"the details {details[:80]!r} are no tests: {problem}. Write "
            '{"cases": [{"stdin": "1 2", "stdout": "3"}]} or {"function": "add", "calls": '
            '[{"arguments": [1, 2], "result": 3}]}, or remove the row'
        )
    return tests


def _problems(tests: _Tests) -> Iterator[str]:
    if not tests.cases and not tests.calls:
        yield "there is no case and no call"
    if tests.calls and not tests.function.isidentifier():
        yield f"{tests.function!r} names no function for the calls"
    if tests.function and not tests.calls:
        yield "the function has no calls"
    for case in tests.cases:
        case.stdin.encode()  # a surrogate without its pair is a ValueError


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _passes(test: _Case | _Call, output: bytes) -> bool:
    """Compare what a program wrote with what a test expects."""
    text = output.decode("utf-8", "replace")
    if isinstance(test, _Case):
        return _strip(text) == _strip(test.stdout)
    try:
        return _is_equal(json.loads(text), test.result)
    except (ValueError, RecursionError):
        return False  # nothing, or nothing that JSON can hold


def _strip(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.split("\n")).rstrip()


def _is_equal(first: Any, second: Any) -> bool:
    """Return True for two JSON values of the same type and value. JSON has one type of numbers."""
    if _is_number(first) and _is_number(second):
        return _is_close(first, second)
    if type(first) is not type(second):
        return False
    if isinstance(first, list):
        return len(first) == len(second) and all(map(_is_equal, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(
            _is_equal(value, second[key]) for key, value in first.items()
        )
    return bool(first == second)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_close(first: int | float, second: int | float) -> bool:
    if isinstance(first, int) and isinstance(second, int):
        return first == second
    try:
        return math.isclose(first, second, rel_tol=_RELATIVE_TOLERANCE, abs_tol=_ABSOLUTE_TOLERANCE)
    except OverflowError:
        return False  # an integer that is larger than every float
