"""Names of slow calls, frames, and the memory that shows the current call."""

import asyncio
import logging
from types import SimpleNamespace

import msgspec
import pytest

from megatron_rl.rollouts.user_process.attempts import RunningCall
from megatron_rl.rollouts.user_process.current_call import CALL, CurrentCall, make_task_factory
from megatron_rl.rollouts.user_process.frames import (
    MAX_FRAME_BYTES,
    FrameError,
    FrameSplitter,
    encode_frame,
)
from megatron_rl.rollouts.user_process.messages import CancelCall, Heartbeat
from megatron_rl.rollouts.user_process.watch import ProcessWatch


def call_of(subject: str) -> RunningCall:
    return RunningCall(None, subject, None)  # type: ignore[arg-type]


def open_watch(calls: dict[int, RunningCall], current: int = 0) -> tuple[ProcessWatch, list[str]]:
    """Return a watch of a process that does not exist, and its warnings."""
    lines: list[str] = []

    def warn(text: str, *, to_rank_0: bool = True) -> None:
        lines.append(f"{'rank 0' if to_rank_0 else 'log'}: {text}")

    process = SimpleNamespace(name="reward.name=m:C", current=SimpleNamespace(get=lambda: current))
    watch = ProcessWatch(
        process,  # type: ignore[arg-type]
        calls,
        max_silence_s=60,
        end=logging.info,
        warn=warn,
    )
    return watch, lines


def test_a_slow_call_is_named_after_ten_seconds_and_at_growing_intervals() -> None:
    watch, lines = open_watch({1: call_of("group g, rollout 3"), 2: call_of("group i, rollout 0")})
    named_at = []
    for second in range(130):
        watch.hear(Heartbeat(1, float(second)))
        watch.check(now=1000.0 + second)
        if lines:
            named_at.append(second)
            lines.pop()
    assert named_at == [10, 20, 40, 80]
    watch.hear(Heartbeat(2, 12.0))
    watch.check(now=5000.0)
    text = "reward.name=m:C: group i, rollout 0 takes 12 s; 2 calls run or wait"
    assert lines == [f"rank 0: {text}"]


def test_slow_calls_are_not_named_more_often_than_once_a_minute() -> None:
    watch, lines = open_watch({1: call_of("group g")})
    for second in range(0, 119):
        watch.hear(Heartbeat(1, 12.0 if second % 2 else 0.0))
        watch.check(now=float(second))
    assert [line.partition(":")[0] for line in lines] == ["rank 0", "log"]


@pytest.mark.parametrize(
    ("current", "place"),
    [(7, "its process, in which group g, rollout 3 runs,"), (0, "its process")],
)
def test_a_silent_process_is_named_with_the_call_whose_code_runs(current: int, place: str) -> None:
    watch, lines = open_watch({7: call_of("group g, rollout 3")}, current=current)
    watch.silence_seconds = 11.0
    watch.check(now=0.0)
    assert lines == [
        f"rank 0: reward.name=m:C: {place} answers nothing for 11 s; 1 calls run or wait"
    ]


def test_frames_are_found_in_any_pieces() -> None:
    messages = [CancelCall(number) for number in (1, 300, 2**40)]
    data = b"".join(map(encode_frame, messages))
    for size in (1, 3, 7, len(data)):
        splitter = FrameSplitter()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        bodies = [body for piece in pieces for body in splitter.split(piece)]
        assert [msgspec.msgpack.decode(body, type=CancelCall) for body in bodies] == messages
    with pytest.raises(FrameError, match="at most"):
        list(FrameSplitter().split((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


def test_the_current_call_is_that_of_the_task_whose_code_runs() -> None:
    current = CurrentCall.create()
    other = CurrentCall(current.descriptor)  # as the collector sees it
    numbers: list[int] = []

    async def inner() -> None:
        numbers.append(other.get())
        await asyncio.sleep(0)
        numbers.append(other.get())

    async def call(number: int) -> None:
        CALL.set(number)
        await asyncio.gather(asyncio.create_task(inner()), inner())

    async def run() -> None:
        asyncio.get_running_loop().set_task_factory(make_task_factory(current))
        await asyncio.gather(call(5), call(6))
        numbers.append(other.get())

    asyncio.run(run())
    assert sorted(numbers) == [0, *[5] * 4, *[6] * 4]


def test_a_task_for_a_call_can_be_cancelled_and_raises_its_own_exception() -> None:
    current = CurrentCall.create()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("k")

    async def run() -> None:
        CALL.set(3)
        asyncio.get_running_loop().set_task_factory(make_task_factory(current))
        with pytest.raises(KeyError):
            await asyncio.create_task(fail())
        task = asyncio.create_task(asyncio.sleep(60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert current.get() == 0

    asyncio.run(run())
