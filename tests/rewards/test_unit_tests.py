"""Unit tests as a reward: programs in responses, tests, comparison, forging, limits."""

import asyncio
import json
import time
from typing import Any

import pytest

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.contracts.group import Verdict
from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.rollout import FinishReason
from megatron_rl.rewards.verifiers.unit_tests import UnitTests, find_program
from tests.support.questions import make_question

ADD = {"function": "add", "calls": [{"arguments": [1, 2], "result": 3}]}
SUM = {"cases": [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5\n", "stdout": "9\n"}]}
SUM_PROGRAM = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def scorer() -> UnitTests:
    return open_unit_tests()


def open_unit_tests(**options: Any) -> UnitTests:
    """Open a scorer, or skip the test where the machine has no bubblewrap or namespaces."""
    try:
        scorer = UnitTests(cpu_s=1, memory_mb=128, **options)
        score(scorer, "", ADD)
    except (Failure, RuntimeError) as error:
        pytest.skip(str(error))
    return scorer


def score(scorer: UnitTests, text: str, tests: object, finish: str = "stop") -> Verdict:
    details = tests if isinstance(tests, str) else json.dumps(tests)
    prompt = Prompt(id="p", token_ids=(1,), answer="", task="t", details=details)
    return asyncio.run(scorer.score(prompt, text, FinishReason(finish)))


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\nx = 1\n```\nBetter:\n```py\nx = 2\ny = 3\n```", "x = 2\ny = 3\n"),
        ("~~~python\ns = '''\n```\n'''\n~~~", "s = '''\n```\n'''\n"),
        ("````\n```\nx\n```\n````", "```\nx\n```\n"),
        ("1. So:\n   ```python\n   if x:\n       y\n   ```", "if x:\n    y\n"),
        ("```python\nx = 1\n```\n```python\nx = 2", "x = 2\n"),
        ("The `code` is ``here``", "The `code` is ``here``"),
        ("```python\r\nx = 1\r\n```\r\n", "x = 1\r\n"),
        ("```python\n```", ""),
    ],
)
def test_the_last_block_of_code_is_the_program(text: str, program: str) -> None:
    assert find_program(text) == program


def test_many_fences_take_little_time() -> None:
    text = "```python\n" * 100_000
    start = time.process_time()
    find_program(text)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("details", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "Expected `object`"),
        ("{}", "no case and no call"),
        ('{"tests": []}', "unknown field `tests`"),
        ('{"cases": [{"stdin": "1"}]}', "missing required field `stdout`"),
        ('{"cases": [{"stdin": 1, "stdout": "1"}]}', "Expected `str`"),
        ('{"calls": [{"arguments": [], "result": 1}]}', "names no function"),
        ('{"function": "a.b", "calls": [{"arguments": [], "result": 1}]}', "names no function"),
        ('{"function": "f", "cases": [{"stdin": "", "stdout": ""}]}', "has no calls"),
        ('{"function": "f", "calls": [{"arguments": {}, "result": 1}]}', "Expected `array`"),
        ('{"function": "f", "calls": [{"arguments": [], "result": NaN}]}', "NaN is not JSON"),
        ('{"cases": [{"stdin": "\\ud800", "stdout": ""}]}', "surrogates not allowed"),
        ('{"cases": ' + "[" * 100_000, "nested too deeply"),
        ('{"cases": ' + "1" * 5000 + "}", "digits"),
    ],
)
def test_invalid_tests_are_refused(details: str, problem: str) -> None:
    scorer = UnitTests(sandbox="weak")
    with pytest.raises(ValueError, match=problem) as refusal:
        scorer.check_answer(make_question("", details=details))
    assert "Write" in str(refusal.value) and "remove the row" in str(refusal.value)


def test_valid_tests_are_accepted() -> None:
    scorer = UnitTests(sandbox="weak")
    scorer.check_answer(make_question("", details=json.dumps(ADD | SUM)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "tests", "reward"),
    [
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return a - b", ADD, 0.0),
        ("def add(a, b): return str(a + b)", ADD, 0.0),
        ("def add(a, b): return a + b\nprint('debug' * 99)", ADD, 1.0),
        ("def add(a, b): print(a); return a + b", ADD, 1.0),
        ("def sub(a, b): return 3", ADD, 0.0),
        ("def add(a, b): return", ADD, 0.0),
        ("def add(a, b): return {3}", ADD, 0.0),
        ("def add(a, b): return a + b\n1/0", ADD, 0.0),
        ("def add(a, b):", ADD, 0.0),
        (
            "def add(a, b): return a + b\nif __name__ == '__main__': print(add(int(input()), 2))",
            ADD,
            1.0,
        ),
        (SUM_PROGRAM, SUM, 1.0),
        ("print(3)", SUM, 0.0),
        ("print(*map(int, input().split()))", SUM, 0.0),
        (f"{SUM_PROGRAM}\nimport os; os._exit(3)", SUM, 0.0),
        (f"{SUM_PROGRAM}\nimport sys; sys.exit(3)", SUM, 1.0),  # no exit code decides
        ("", SUM, 0.0),
        (f"def add(a, b): return a + b\nif __name__ == '__main__': {SUM_PROGRAM}", ADD | SUM, 1.0),
    ],
)
def test_a_program_is_correct_if_all_tests_pass(
    scorer: UnitTests, program: str, tests: object, reward: float
) -> None:
    text = f"The program:\n```python\n{program}\n```\n"
    verdict = score(scorer, text, tests)
    assert (verdict.reward, verdict.correctness) == (reward, reward)
    assert verdict.answer == f"{program}\n"


# Programs for ADD that try to be correct without the sum
FORGERIES = {
    "printed verdict": """
print('{"passed": true}'); print("OK"); print(1.0)
def add(a, b): return None
""",
    "exit code": """
import os
os._exit(0)
""",
    "result of another kind": """
class Equal:
    def __eq__(self, other): return True
class EqualInt(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
def add(a, b): return EqualInt(7)
""",
    "replaced encoder": """
import json
class Any(str):
    def __eq__(self, other): return True
json.dumps = lambda value: "true"
def add(a, b): return Any("3")
""",
    "frames of the caller": """
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        for values in (frame.f_locals, frame.f_globals):
            for value in list(values.values()):
                if isinstance(value, dict) and "result" in value:
                    return value["result"]
                if isinstance(value, dict) and "calls" in value:
                    return value["calls"][0]["result"]
        frame = frame.f_back
""",
    "whole memory": """
import gc
def add(a, b):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and isinstance(thing.get("result"), int):
            return thing["result"]
""",
    "every descriptor": """
import os
def add(a, b):
    for number in range(64):
        try:
            os.write(number, b"4")
        except OSError:
            pass
    os._exit(0)
""",
    "many results": """
import os
def add(a, b):
    for number in range(64):
        try:
            os.write(number, b"\\n".join(b"%d" % value for value in range(100)))
        except OSError:
            pass
    os._exit(0)
""",
    "deep result": """
import os
def add(a, b):
    os.write(3, b"[" * 900000)
    os._exit(0)
""",
    "large number": """
import os
def add(a, b):
    os.write(3, b"3" * 900000)
    os._exit(0)
""",
    "no JSON": """
def add(a, b): return float("nan")
""",
    "invalid text": """
import os
os.write(3, b"\\xff\\xfe3")
os._exit(0)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FORGERIES)
def test_no_forged_result_passes(scorer: UnitTests, name: str) -> None:
    verdict = score(scorer, FORGERIES[name], ADD)
    assert (verdict.reward, verdict.correctness) == (0.0, 0.0)


@pytest.mark.slow
def test_a_program_sees_one_test_at_a_time(scorer: UnitTests) -> None:
    """A program that remembers its calls in a file, or reads all of its input, learns nothing."""
    program = """
import os, sys
def count(_):
    with open("/tmp/calls", "a+") as file:
        file.write("x")
        file.seek(0)
        return len(file.read())
"""
    calls = [{"arguments": [number], "result": 1} for number in range(3)]
    assert score(scorer, program, {"function": "count", "calls": calls}).reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "target", "reward"),
    [
        ("1.0000004", 1.0, 1.0),
        ("1.000002", 1.0, 0.0),
        ("0.1 + 0.2", 0.3, 1.0),
        ("5.0", 5, 1.0),  # one number in JSON
        ("True", 1, 0.0),
        ("1", True, 0.0),
        ("2 ** 70", 2**70, 1.0),
        ("2 ** 70 + 1", 2**70, 0.0),
        ("10 ** 400", 1.0, 0.0),
        ("(1, [2.0000001])", [1, [2.0]], 1.0),
        ("[1, 2]", [1, 2, 3], 0.0),
        ("{'a': None, 'b': 'x '}", {"b": "x ", "a": None}, 1.0),
        ("{'b': 'x'}", {"b": "x "}, 0.0),
        ("{}", [], 0.0),
        ("None", None, 1.0),
        ("'\\ud83d\\ude00'", "😀", 1.0),  # JSON writes both in the same way
        ("'é'", "é", 1.0),
    ],
)  # fmt: skip
def test_results_are_equal_by_type_and_value(
    scorer: UnitTests, expression: str, target: object, reward: float
) -> None:
    tests = {"function": "f", "calls": [{"arguments": [], "result": target}]}
    assert score(scorer, f"def f(): return {expression}", tests).reward == reward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("output", "target", "reward"),
    [
        ("1 2 \n3\n\n", "1 2\n3", 1.0),
        ("1 2\r\n3", "1 2\n3\n", 1.0),
        ("1  2", "1 2", 0.0),
        (" 1", "1", 0.0),
        ("\n1", "1", 0.0),
        ("1.0", "1", 0.0),
    ],
)
def test_output_is_equal_but_for_white_space_at_ends(
    scorer: UnitTests, output: str, target: str, reward: float
) -> None:
    tests = {"cases": [{"stdin": "", "stdout": target}]}
    assert score(scorer, f"print({output!r})", tests).reward == reward


@pytest.mark.slow
def test_partial_rewards_are_the_share_of_tests() -> None:
    scorer = open_unit_tests(partial=True)
    program = "print(3)\ndef add(a, b): return 3"
    verdict = score(scorer, program, ADD | SUM)
    assert verdict.correctness == verdict.reward == pytest.approx(2 / 3)
    loop = "import sys\nif '4' in input():\n    while True: pass\nprint(3)\ndef add(a, b): return 3"
    assert score(scorer, loop, ADD | SUM).reward == pytest.approx(1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    while True: pass",
        "def add(a, b):\n    x = [0]\n    while True: x += x",
        "import os\ndef add(a, b):\n    while True: os.write(3, b'3' * 9999)",
        "print(3, flush=True)\nwhile True: pass",
    ],
)
def test_a_limit_makes_a_program_incorrect(scorer: UnitTests, program: str) -> None:
    tests = {"cases": [{"stdin": "", "stdout": "3"}]} if "add" not in program else ADD
    for _ in range(2):
        assert score(scorer, program, tests).reward == 0.0


@pytest.mark.slow
def test_a_program_that_waits_has_no_verdict() -> None:
    scorer = open_unit_tests(wall_s=2.0)
    with pytest.raises(TimeoutError, match="waited beyond the limit of the clock"):
        score(scorer, "import time\ndef add(a, b): time.sleep(99)", ADD)


@pytest.mark.slow
def test_only_a_response_that_ended_by_itself_is_tested(scorer: UnitTests) -> None:
    program = "def add(a, b): return a + b"
    assert score(scorer, program, ADD, finish="length").reward == 0.0
    with pytest.raises(ValueError, match="aborted"):
        score(scorer, program, ADD, finish="abort")


@pytest.mark.slow
def test_many_responses_are_judged_at_the_same_time(scorer: UnitTests) -> None:
    programs = [f"def add(a, b): return a + b + {number % 2}" for number in range(40)]

    async def judge() -> list[float | None]:
        prompt = Prompt(id="p", token_ids=(1,), answer="", task="t", details=json.dumps(ADD))
        calls = [scorer.score(prompt, program, FinishReason.STOP) for program in programs]
        return [verdict.reward for verdict in await asyncio.gather(*calls)]

    assert asyncio.run(judge()) == [1.0, 0.0] * 20
