"""Measures the processor time of an empty program in a sandbox, and of a plain interpreter.

    python -m tests.rewards.sandbox.speed

It prints seconds of processor time for each of them, those of this process included. They depend
little on the load of the machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import resource
import subprocess
import time
from collections.abc import Awaitable, Callable

from megatron_rl.rewards.sandbox import Sandbox
from megatron_rl.rewards.sandbox.bubblewrap import Interpreter

_SET_CHILD_SUBREAPER = 36
_ROUNDS = 5
_CALLS = 10


def processor_time() -> float:
    """Return the processor time of this process and of all below it that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0) != (0, 0):
            pass
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage)


async def seconds_of(call: Callable[[], Awaitable[object]]) -> float:
    """Return the processor time of one call."""
    before = processor_time()
    for _ in range(_CALLS):
        await call()
    return (processor_time() - before) / _CALLS


async def measure() -> dict[str, float]:
    """Measure both in turns. The fastest rounds count."""
    sandbox = Sandbox()
    command = [Interpreter.find().path, "-I", "-S", "-c", ""]

    async def start_interpreter() -> None:
        subprocess.run(command, env={}, check=True)

    seconds: dict[str, float] = {"sandbox": 1.0, "interpreter": 1.0, "clock": 1.0}
    await sandbox.run("")
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        seconds["sandbox"] = min(seconds["sandbox"], await seconds_of(lambda: sandbox.run("")))
        seconds["clock"] = min(seconds["clock"], (time.perf_counter() - start) / _CALLS)
        seconds["interpreter"] = min(seconds["interpreter"], await seconds_of(start_interpreter))
    return seconds


if __name__ == "__main__":
    # Bubblewrap's first process ends after its parent, and is then a child of this one
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    print(json.dumps(asyncio.run(measure())))
