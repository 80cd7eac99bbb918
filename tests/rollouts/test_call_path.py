"""The path of a request through the code: from the loop to the hub, and on to the engine."""

import asyncio
import contextlib
import sys
from collections.abc import Coroutine, Iterator
from pathlib import Path
from types import CoroutineType, FrameType
from typing import Any

from megatron_rl.config.schema import DataSettings, RolloutSettings, SelectionSettings
from megatron_rl.prompts.selection.factory import open_selector
from megatron_rl.prompts.source import PromptSource
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.steps.rollout_batch import RolloutBatch
from megatron_rl.rollouts.steps.sampler import RolloutSampler
from megatron_rl.rollouts.wire.messages import GroupRequest, ToCollector
from tests.rollouts.test_collector import request
from tests.support.answers import make_pool
from tests.support.collectors import Outbox
from tests.support.fake_engine import Reply, configuration, fake_engine, reply, serving
from tests.support.leaders import ScriptedParts, lead
from tests.support.scripted_hub import ScriptedHub

PACKAGES = ("/megatron_rl/", "/sglang_bridge/")
MAX_FRAMES = 20  # calls between the loop of rank 0 and the HTTP request
MAX_FILES = 15  # in which they are


class Sampled(Exception):
    """Ends the run: the first request was sent."""


def is_own(file: str) -> bool:
    return any(package in file for package in PACKAGES) and "/site-packages/" not in file


def name_of(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"


def frames_above(frame: FrameType | None) -> Iterator[str]:
    """Yield the calls of this project that lead to a frame, the innermost first."""
    while frame is not None:
        if is_own(frame.f_code.co_filename):
            yield name_of(frame)
        frame = frame.f_back


def path_on_rank_0(directory: Path) -> list[str]:
    """Return the calls from the loop to the message, with a real sampler and queue."""
    path: list[str] = []

    class Hub(ScriptedHub):
        def send(self, node: int, message: ToCollector) -> None:
            if isinstance(message, GroupRequest):
                path.extend(frames_above(sys._getframe(1)))
                raise Sampled
            super().send(node, message)

    settings = RolloutSettings(max_new_tokens=8, prompts_per_step=2, samples_per_prompt=2)
    pool = make_pool(4)
    source = PromptSource(pool, pool[:1], DataSettings(source="column_addition"))
    selector = open_selector(source, settings, SelectionSettings(), seed=0)
    queue = RolloutQueue(Hub(0, lambda *_: 1.0), settings)  # type: ignore[arg-type]
    queue.configure({})
    sampler = RolloutSampler(queue, settings, selector, (1,), lambda: None)

    class Parts(ScriptedParts):
        def begin_step(self, step: int) -> None:
            sampler.begin_step(step)

        def sample(self, step: int) -> RolloutBatch:
            return sampler.sample(step)

    with contextlib.suppress(Sampled):
        lead(Parts(), directory)
    return path


def awaits_of(coroutine: Any) -> Iterator[str]:
    """Yield the coroutines of this project that one another await, the outermost first.

    `_wait_for_answer` waits beside the task that makes the request.
    """
    while isinstance(coroutine, CoroutineType):
        is_beside = coroutine.cr_code.co_name == "_wait_for_answer"
        if is_own(coroutine.cr_code.co_filename) and not is_beside:
            yield f"{Path(coroutine.cr_code.co_filename).name}:{coroutine.cr_code.co_qualname}"
        coroutine = coroutine.cr_await


async def path_in_the_collector() -> list[str]:
    """Return the calls of all tasks of a request while the engine works on it."""
    path: list[str] = []

    async def answer(_: int, body: Reply) -> Reply:
        for task in asyncio.all_tasks():
            coroutine: Coroutine[Any, Any, Any] | None = task.get_coro()
            path.extend(awaits_of(coroutine))
        return reply(body, "4")

    async with fake_engine(answer) as url:
        outbox = Outbox()
        collector = Collector(0, configuration(), outbox.put)
        await collector.handle(serving(url))
        await collector.handle(request(1))
        await asyncio.wait_for(outbox.get(), 30)
        await collector.close()
    return path


def test_a_request_takes_few_calls_from_the_loop_to_the_engine(tmp_path: Path) -> None:
    path = [*reversed(path_on_rank_0(tmp_path)), *asyncio.run(path_in_the_collector())]
    assert any("Leader" in name for name in path) and any("Post" in name for name in path), path
    assert len(path) <= MAX_FRAMES, "\n".join(path)
    files = {name.partition(":")[0] for name in path}
    assert len(files) <= MAX_FILES, files
