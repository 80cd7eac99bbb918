"""Calls of scorers and environments: their endings and their time limits."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from megatron_rl.rewards.user_calls import Ending, Outcome, call_with_limit

Call = Callable[[], Awaitable[int]]


def run(call: Call, seconds: float = 0.05) -> Outcome[int]:
    async def work() -> Outcome[int]:
        return await call_with_limit(call, seconds)

    return asyncio.run(work())


async def return_five() -> int:
    return 5


async def fail() -> int:
    raise KeyError("k")


async def cancel_itself() -> int:
    raise asyncio.CancelledError


async def exit_python() -> int:
    raise SystemExit(2)


async def interrupt() -> int:
    raise KeyboardInterrupt


async def sleep() -> int:
    await asyncio.sleep(60)
    return 1


async def return_after_cancellation() -> int:
    try:
        return await sleep()
    except asyncio.CancelledError:
        return 7


def fail_without_await() -> Awaitable[int]:
    raise TypeError("not a coroutine")


@pytest.mark.parametrize(
    ("call", "ending", "error"),
    [
        (return_five, Ending.RETURNED, type(None)),
        (fail, Ending.RAISED, KeyError),
        (cancel_itself, Ending.CANCELLED, asyncio.CancelledError),
        (exit_python, Ending.RAISED, RuntimeError),
        (interrupt, Ending.RAISED, KeyboardInterrupt),
        (sleep, Ending.TIMED_OUT, type(None)),
        (return_after_cancellation, Ending.TIMED_OUT, type(None)),
        (fail_without_await, Ending.RAISED, TypeError),
    ],
)
def test_endings_of_calls(call: Call, ending: Ending, error: type) -> None:
    outcome = run(call)
    assert (outcome.ending, type(outcome.error)) == (ending, error)
    assert outcome.value == (5 if ending is Ending.RETURNED else None)


def test_cancelling_a_call_with_a_limit_cancels_the_call() -> None:
    cancellations = []

    async def call() -> int:
        try:
            return await sleep()
        except asyncio.CancelledError:
            cancellations.append(1)
            raise

    async def work() -> None:
        task = asyncio.create_task(call_with_limit(call))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)

    asyncio.run(work())
    assert cancellations == [1]
