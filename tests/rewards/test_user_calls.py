"""Calls of user-defined classes: their endings, their time limits, and those that never end."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from megatron_rl.rewards.user_calls import (
    Ending,
    Outcome,
    SystemExitCalled,
    TimeLimit,
    TooManyAbandoned,
    UserCalls,
)

Call = Callable[[], Awaitable[int]]


@pytest.fixture(autouse=True)
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_rl.rewards.user_calls._GRACE_SECONDS", 0.05)


class Stubborn:
    """Ignores cancellations until `event` is set."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.cancellations = 0

    async def call(self) -> int:
        while not self.event.is_set():
            try:
                await self.event.wait()
            except asyncio.CancelledError:
                self.cancellations += 1
        return 1


def run(call: Call, seconds: float = 0.05) -> Outcome[int]:
    async def work() -> Outcome[int]:
        return await UserCalls("reward.name=m:C", max_abandoned=1).run(call, TimeLimit(seconds))

    return asyncio.run(work())


async def succeed() -> int:
    return 5


async def fail() -> int:
    raise KeyError("k")


async def cancel_itself() -> int:
    raise asyncio.CancelledError


async def exit_python() -> int:
    raise SystemExit(2)


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
        (succeed, Ending.RETURNED, type(None)),
        (fail, Ending.RAISED, KeyError),
        (cancel_itself, Ending.CANCELLED, asyncio.CancelledError),
        (exit_python, Ending.RAISED, SystemExitCalled),
        (sleep, Ending.TIMED_OUT, asyncio.CancelledError),
        (return_after_cancellation, Ending.TIMED_OUT, type(None)),
        (fail_without_await, Ending.RAISED, TypeError),
    ],
)
def test_endings_of_calls(call: Call, ending: Ending, error: type) -> None:
    outcome = run(call)
    assert (outcome.ending, type(outcome.error)) == (ending, error)
    assert outcome.value == (5 if ending is Ending.RETURNED else None)


def test_a_pause_stops_the_clock_and_a_restart_begins_it_again() -> None:
    async def work() -> tuple[Ending, Ending]:
        calls = UserCalls("m:C", max_abandoned=1)
        endings = []
        for is_paused in (True, False):
            limit = TimeLimit(0.1)

            async def call(limit: TimeLimit = limit, is_paused: bool = is_paused) -> int:
                await asyncio.sleep(0.06)
                if is_paused:
                    limit.pause()
                await asyncio.sleep(0.15)
                limit.restart()
                await asyncio.sleep(0.02)
                return 1

            endings.append((await calls.run(call, limit)).ending)
        return endings[0], endings[1]

    assert asyncio.run(work()) == (Ending.RETURNED, Ending.TIMED_OUT)


def test_an_abandoned_call_counts_until_it_ends() -> None:
    async def work() -> list[Ending]:
        stubborn = Stubborn()
        calls = UserCalls("m:C", max_abandoned=1)
        endings = [(await calls.run(stubborn.call, TimeLimit(0.02))).ending]
        stubborn.event.set()
        await asyncio.sleep(0.02)
        other = Stubborn()
        endings.append((await calls.run(other.call, TimeLimit(0.02))).ending)
        with pytest.raises(TooManyAbandoned, match=r"m:C: 2 calls .*max_abandoned_calls=1 is"):
            await calls.run(other.call, TimeLimit(0.02), subject="group g")
        other.event.set()
        return endings

    assert asyncio.run(work()) == [Ending.ABANDONED, Ending.ABANDONED]


def test_every_abandoned_call_is_logged_and_some_are_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports: list[str] = []

    async def report(text: str) -> None:
        reports.append(text)

    async def work() -> None:
        stubborn = Stubborn()
        calls = UserCalls("reward.name=m:C", max_abandoned=9, report=report)
        for index in range(5):
            await calls.run(stubborn.call, TimeLimit(0.01), subject=f"group {index}")
        stubborn.event.set()

    with caplog.at_level(logging.WARNING):
        asyncio.run(work())
    assert len(caplog.records) == 5
    assert [report[-10:] for report in reports] == [f" number {n})" for n in (1, 2, 4)]
    assert all("reward.name=m:C: a call" in report and "(group " in report for report in reports)


def test_cancelling_the_run_of_a_stubborn_call_takes_a_bounded_time() -> None:
    async def work() -> int:
        stubborn = Stubborn()
        calls = UserCalls("m:C", max_abandoned=1)
        task = asyncio.create_task(calls.run(stubborn.call, TimeLimit(60)))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 5)
        stubborn.event.set()
        return stubborn.cancellations

    assert asyncio.run(work()) == 1
