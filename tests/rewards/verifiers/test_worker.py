"""A worker makes calls within limits, and the kernel ends it beyond them."""

import asyncio
import mmap
import os
import re
import signal
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_rl.rewards.verifiers.worker import Worker

GIBIBYTE = 1 << 30
MEBIBYTE = 1 << 20


def backtrack(request: bytes) -> bytes:
    """Take all CPU time inside of C code, where no Python code can interrupt it."""
    re.match(b"(a+)+$", b"a" * 40 + b"b")
    return b"never"


def fill_memory(request: bytes) -> bytes:
    """Take memory, and catch the error as libraries do."""
    try:
        return bytes(4 * GIBIBYTE)[:1]
    except Exception:
        return b"swallowed"


def fail(request: bytes) -> bytes:
    raise ValueError("not this one")


def leave(request: bytes) -> bytes:
    os._exit(3)


def echo_or_hang(request: bytes) -> bytes:
    if request == b"hang":
        backtrack(request)
    if request == b"sleep":
        time.sleep(60)
    return request + str(os.getpid()).encode()


def run(
    function: Callable[[bytes], bytes],
    use: Callable[[Worker], Coroutine[Any, Any, None]],
    *,
    cpu_seconds: float = 0.2,
    memory_bytes: int = GIBIBYTE,
) -> None:
    """Use a worker, and check that no child is left."""

    async def main() -> None:
        worker = Worker(function, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes)
        try:
            await use(worker)
        finally:
            pid = worker.pid
            worker.close()
            worker.close()  # you may call it again
        assert not psutil.pid_exists(pid) or pid == 0

    asyncio.run(main())


def test_calls_have_their_results_in_one_child() -> None:
    async def use(worker: Worker) -> None:
        results = await asyncio.gather(*(worker.call(b"%d-" % call) for call in range(20)))
        assert results == [b"%d-%d" % (call, worker.pid) for call in range(20)]
        assert worker.pid != os.getpid()
        large = b"x" * (8 * MEBIBYTE)
        assert await worker.call(large) == large + str(worker.pid).encode()

    run(echo_or_hang, use, cpu_seconds=2.0)


@pytest.mark.parametrize(
    ("function", "kind", "message"),
    [
        (backtrack, TimeoutError, r"more than 0\.2 s of CPU time"),
        (fill_memory, MemoryError, r"more than 1024 MiB of memory"),
        (fail, RuntimeError, r"ValueError: not this one"),
        (leave, ChildProcessError, r"exit code 3"),
    ],
)
def test_calls_that_fail_say_why(
    function: Callable[[bytes], bytes], kind: type[Exception], message: str
) -> None:
    async def use(worker: Worker) -> None:
        for _ in range(2):
            with pytest.raises(kind, match=message):
                await worker.call(b"")

    run(function, use)


def test_a_call_that_burns_cpu_time_changes_no_other_and_is_replaced_within_a_second() -> None:
    async def use(worker: Worker) -> None:
        first = await worker.call(b"")
        start = time.monotonic()
        calls = (worker.call(request) for request in (b"", b"hang", b"", b"hang", b""))
        results = await asyncio.gather(*calls, return_exceptions=True)
        seconds = time.monotonic() - start
        assert results[0] == first
        assert isinstance(results[1], TimeoutError) and isinstance(results[3], TimeoutError)
        assert isinstance(results[2], bytes) and isinstance(results[4], bytes)
        assert len({first, results[2], results[4]}) == 3
        print(f"two calls of 0.2 s of CPU time and their replacements: {seconds:.2f} s")

    run(echo_or_hang, use)


def test_a_child_is_killed_and_replaced_within_a_second() -> None:
    async def use(worker: Worker) -> None:
        await worker.call(b"")
        durations = []
        for _ in range(5):
            start = time.monotonic()
            os.kill(worker.pid, signal.SIGKILL)
            with pytest.raises(ChildProcessError, match="exit code -9"):
                await worker.call(b"")
            await worker.call(b"")
            durations.append(time.monotonic() - start)
        print(f"kill and replacement: {max(durations):.3f} s at most")
        assert max(durations) <= 1.0

    run(echo_or_hang, use)


def test_cancelling_a_call_kills_its_child() -> None:
    async def use(worker: Worker) -> None:
        first = await worker.call(b"")
        pid = worker.pid
        call = asyncio.create_task(worker.call(b"sleep"))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert not psutil.pid_exists(pid)
        assert await worker.call(b"") != first

    run(echo_or_hang, use)


def test_a_child_that_grows_is_replaced_between_two_calls() -> None:
    blocks: list[mmap.mmap] = []

    def keep(request: bytes) -> bytes:
        # The heap of this process might have free memory, which the child has, too
        blocks.append(mmap.mmap(-1, 5 * MEBIBYTE))
        blocks[-1].write(b"x" * (5 * MEBIBYTE))
        return b"%d" % os.getpid()

    async def use(worker: Worker) -> None:
        pids = [await worker.call(b"") for _ in range(30)]
        assert len(set(pids)) >= 4
        assert max(pids.count(pid) for pid in pids) <= 8  # 32 MiB, and the call beyond it

    run(keep, use)


def test_a_child_writes_no_file(tmp_path: Path) -> None:
    def write(request: bytes) -> bytes:
        print("a library's log")
        (tmp_path / "file").write_bytes(b"text")
        return b"written"

    async def use(worker: Worker) -> None:
        with pytest.raises(RuntimeError, match="File too large"):
            await worker.call(b"")
        assert (tmp_path / "file").stat().st_size == 0

    run(write, use)


@pytest.mark.slow
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed in the middle of a call."""
    parent = os.fork()
    if parent == 0:

        async def die() -> None:
            worker = Worker(echo_or_hang, cpu_seconds=5, memory_bytes=GIBIBYTE)
            await worker.call(b"")
            (tmp_path / "pid").write_text(str(worker.pid))
            await worker.call(b"sleep")

        asyncio.run(die())
    deadline = time.monotonic() + 10
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    child.wait(5)
