"""Programs in a sandbox: input and output, limits, cancellation, weak mode, refusals, speed."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import psutil
import pytest

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.rewards.sandbox import Ending, Limits, ProgramResult, Sandbox
from tests.rewards.sandbox.users import run_as

pytestmark = pytest.mark.slow
MODES: tuple[Literal["strict", "weak"], ...] = ("strict", "weak")


def open_sandbox(
    mode: Literal["strict", "weak"] = "strict", limits: Limits | None = None, **options: int
) -> Sandbox:
    """Open a sandbox, or skip the test where the machine has no namespaces."""
    try:
        sandbox = Sandbox(limits, mode=mode, **options)
        asyncio.run(sandbox.check())
    except Failure as failure:
        if mode == "weak":
            raise
        pytest.skip(str(failure))
    return sandbox


def run(sandbox: Sandbox, program: str, stdin: bytes = b"") -> ProgramResult:
    return asyncio.run(sandbox.run(program, stdin))


@pytest.mark.parametrize("mode", MODES)
def test_a_program_reads_standard_input_and_writes_standard_output(mode: str) -> None:
    sandbox = open_sandbox(mode)
    data = b"\xe2\x82\xac 17\n" * 100_000
    program = """
import sys
text = sys.stdin.read()
print(len(text), text.split()[0], __name__, sys.argv)
print(input.__name__, file=sys.stderr)
"""
    result = run(sandbox, program, data)
    assert result == ProgramResult("500000 € __main__ ['program.py']\n".encode(), Ending.EXIT, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("program", "output", "code"),
    [
        ("", b"", 0),
        ("print(1)\nraise SystemExit(7)", b"1\n", 7),
        ("print(1)\nexit()", b"1\n", 0),
        ("print(1)\n1/0", b"1\n", 1),
        ("def f(:", b"", 1),
        ("\ud800", b"", 1),
        ("if __name__ == '__main__': print(2)", b"2\n", 0),
        ("import dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n    x: int\n"
         "print(pickle.loads(pickle.dumps(A(3))))", b"A(x=3)\n", 0),
        ("import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\n"
         "print(f(20000))", b"20000\n", 0),
        ("import asyncio\nasync def f(): await asyncio.sleep(0.01); print(4)\nasyncio.run(f())",
         b"4\n", 0),
        ("import threading\nt = threading.Thread(target=print, args=(5,))\nt.start()\nt.join()",
         b"5\n", 0),
        ("import tempfile\nwith tempfile.TemporaryFile() as f:\n    f.write(b'x')\n    f.seek(0)\n"
         "    print(f.read())", b"b'x'\n", 0),
        ("import math, heapq, bisect, itertools, collections, functools, re, json, decimal, random,"
         " fractions, string, statistics, hashlib, datetime, typing, sqlite3\nprint(6)", b"6\n", 0),
    ],
)  # fmt: skip
def test_ordinary_programs_run(mode: str, program: str, output: bytes, code: int) -> None:
    result = run(open_sandbox(mode), program)
    assert result == ProgramResult(output, Ending.EXIT, code)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("program", "ending", "size"),
    [
        ("while True: pass", Ending.CPU, 0),
        ("x = [0]\nwhile True: x += x", Ending.MEMORY, 0),
        ("while True: print('x' * 9999)", Ending.OUTPUT, 20_000),
        ("print('x' * 19_999)", Ending.EXIT, 20_000),
        ("print('x' * 20_000)", Ending.OUTPUT, 20_000),
        ("import time\nprint(1, flush=True)\ntime.sleep(99)", Ending.CLOCK, 0),
        ("import sys\nwhile True: sys.stderr.write('x' * 99999)", Ending.CPU, 0),
    ],
)
def test_each_limit_ends_a_program(mode: str, program: str, ending: Ending, size: int) -> None:
    wall = 2.0 if ending is Ending.CLOCK else 60.0
    limits = Limits(cpu_s=1, wall_s=wall, memory_mb=128, output_bytes=20_000)
    result = run(open_sandbox(mode, limits), program)
    assert result.ending is ending
    assert len(result.output) == size


def count_processes(memory_mb: int) -> int:
    """Count the processes of sandboxes with a limit of memory, which is one of their arguments."""
    argument = f"memory={memory_mb * 1024**2}"
    return sum(
        argument in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_cancelled_call_leaves_no_process(mode: str) -> None:
    sandbox = open_sandbox(mode, Limits(memory_mb=211))

    async def cancel() -> int:
        calls = [asyncio.create_task(sandbox.run("while True: pass")) for _ in range(4)]
        count = 0
        while count == 0:
            await asyncio.sleep(0.01)
            count = count_processes(211)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert all(call.cancelled() for call in calls)
        return count

    assert asyncio.run(cancel()) > 0
    assert count_processes(211) == 0


KILLED = """
import asyncio
from megatron_rl.rewards.sandbox import Limits, Sandbox
asyncio.run(Sandbox(Limits(memory_mb=223), mode="{mode}").run("while True: pass"))
"""


@pytest.mark.parametrize("mode", MODES)
def test_programs_end_with_the_process_of_the_sandbox(mode: str, tmp_path: Path) -> None:
    open_sandbox(mode)
    command = [sys.executable, "-c", KILLED.format(mode=mode)]
    # A process that is killed leaves its folder
    with subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}) as process:
        while count_processes(223) == 0:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
    end = time.monotonic() + 3  # before the limit of processor time
    while count_processes(223) and time.monotonic() < end:
        time.sleep(0.02)
    assert count_processes(223) == 0


def test_programs_wait_for_a_free_slot_without_losing_time() -> None:
    sandbox = open_sandbox("strict", Limits(cpu_s=1, wall_s=4), concurrency=2)

    async def call() -> list[ProgramResult]:
        program = "import time; time.sleep(1.0); print(1)"
        return list(await asyncio.gather(*[sandbox.run(program) for _ in range(8)]))

    start = time.monotonic()
    results = asyncio.run(call())
    assert {result.output for result in results} == {b"1\n"}
    assert time.monotonic() - start >= 4.0


def test_file_descriptors_and_folders_do_not_grow() -> None:
    sandbox = open_sandbox("strict", Limits(output_bytes=100))
    this = psutil.Process()
    program = "print('x' * 1000)"
    run(sandbox, program)
    before = this.num_fds()
    for _ in range(5):
        run(sandbox, program)
    assert this.num_fds() == before
    assert this.children() == []


def test_without_bubblewrap_the_strict_mode_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        Failure, match=r"reward\.options\.sandbox=strict.*Install.*reward\.options\.sandbox=weak"
    ) as e:
        Sandbox()
    assert e.value.exit_code is ExitCode.REFUSED
    Sandbox(mode="weak")


def test_bubblewrap_beside_the_interpreter_is_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    beside = tmp_path / "bwrap"
    beside.write_text("#!/bin/sh\necho no namespaces here >&2\nexit 1\n")
    beside.chmod(0o755)
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    sandbox = Sandbox()
    with pytest.raises(RuntimeError, match="did not start: no namespaces here"):
        run(sandbox, "")
    with pytest.raises(Failure, match=r"sandbox=strict.*no namespaces here.*CAP_SYS_ADMIN"):
        asyncio.run(sandbox.check())


def test_the_check_says_what_isolates_programs() -> None:
    strict = str(asyncio.run(open_sandbox("strict").check()))
    assert "bubblewrap" in strict and ", seccomp" in strict
    weak = str(asyncio.run(open_sandbox("weak").check()))
    assert "no namespaces" in weak


@pytest.mark.parametrize("name", ["cpu_s", "wall_s", "memory_mb", "files_mb", "threads"])
def test_impossible_limits_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}=0: must be at least"):
        Limits(**{name: 0})


def test_a_clock_that_ends_busy_programs_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wall_s=9: must be at least twice cpu_s=5"):
        Limits(cpu_s=5, wall_s=9)


def test_empty_programs_start_fast() -> None:
    """At least 30 a second and idle core, where a plain interpreter starts 120 times a second."""
    open_sandbox()
    values = json.loads(run_as("own", "-m", "tests.rewards.sandbox.speed"))
    rate = 1 / values["sandbox"]
    ratio = values["sandbox"] / values["interpreter"]
    print(f"{rate:.0f} programs a second and core, {ratio:.1f} times an interpreter")
    assert ratio < 120 / 30
