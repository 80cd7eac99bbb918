"""Large open responses: stored without a pause of the collector, and sent in bounded messages."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import RolloutSettings
from megatron_rl.contracts.group import Group
from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.rollout import Rollout
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.rollouts.collector.collector import Collector, serve
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool
from megatron_rl.rollouts.collector.link import CollectorLink
from megatron_rl.rollouts.queue import RolloutQueue
from megatron_rl.rollouts.queue.hub import CollectorHub
from megatron_rl.rollouts.wire.messages import (
    Configure,
    FromCollector,
    GroupRequest,
    Partial,
    Store,
)
from megatron_rl.rollouts.wire.store import read_rollout
from sglang_bridge.generation import FinishReason, Generation, VersionSpan
from tests.support.collectors import Outbox
from tests.support.fake_engine import configuration
from tests.support.rollouts import assert_equal
from tests.support.saved_groups import save_group
from tests.support.scripted_model import PROMPT

TOKENS = 4096  # of a piece
PIECES = 2
SAMPLES = 16
LAYERS = 48
TOPK = 8
LIMIT_SECONDS = 0.05
SAMPLING = Sampling(max_new_tokens=2**20, temperature=1.0)
REQUEST = GroupRequest(group_id="g", prompt=PROMPT, num_samples=SAMPLES, sampling=SAMPLING)


def piece(num_prompt_tokens: int, tokens: int, num_experts: int) -> Generation:
    """A piece that an engine has stopped, with all routes before it if it is the first."""
    num_rows = tokens - 1 + num_prompt_tokens
    rows = np.arange(num_rows)[:, None] * TOPK + np.arange(TOPK)
    routes = np.repeat((rows % num_experts)[:, None], LAYERS, axis=1)
    return Generation(
        output_ids=np.full(tokens, 7, np.int32),
        logprobs=np.full(tokens, -0.5, np.float32),
        routes=routes.astype(np.min_scalar_type(num_experts - 1)),
        finish_reason=FinishReason.ABORT,
        version_spans=(VersionSpan("0", 0, tokens),),
        cached_tokens=0,
        retractions=0,
    )


class OpenResponses:
    """Engines that have sampled a part of each response. continued: by rollout, all its pieces."""

    def __init__(self, tokens: int = TOKENS, num_experts: int = 128) -> None:
        self._pieces = [piece(len(PROMPT.token_ids), tokens, num_experts)]
        self._pieces += [piece(1, tokens, num_experts)] * (PIECES - 1)
        self.continued: dict[str, list[Generation]] = {}

    async def generate(
        self, pool: EnginePool, token_ids: Sequence[int], sampling: Sampling, **arguments: Any
    ) -> Generation:
        pieces = arguments["pieces"]
        if not pieces:
            pieces += self._pieces
        self.continued[arguments["rid"]] = pieces
        return await asyncio.get_running_loop().create_future()


def install(engines: OpenResponses, monkeypatch: pytest.MonkeyPatch) -> None:
    async def generate(pool: EnginePool, *arguments: Any, **rest: Any) -> Generation:
        return await engines.generate(pool, *arguments, **rest)

    monkeypatch.setattr(EnginePool, "generate", generate)


def large_configuration(num_experts: int) -> Configure:
    shape = RouteShape(
        moe_layers=tuple(range(LAYERS)),
        num_hidden_layers=LAYERS,
        num_experts=num_experts,
        topk=TOPK,
    )
    return msgspec.structs.replace(configuration(), routes=shape)


@contextlib.asynccontextmanager
async def short_steps() -> AsyncIterator[None]:
    """Check that the event loop is free again after 50 ms at the latest.

    The time is measured for its own thread, because other processes may use the processor.
    """
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            start = time.thread_time()
            await asyncio.sleep(0.001)
            longest = max(longest, time.thread_time() - start)

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.01)
    yield
    await asyncio.sleep(0.01)
    watcher.cancel()
    assert longest < LIMIT_SECONDS, f"the event loop was blocked for {longest:.3f} s"


@contextlib.asynccontextmanager
async def opened(
    engines: OpenResponses, request: GroupRequest, num_experts: int
) -> AsyncIterator[tuple[Collector, "asyncio.Queue[FromCollector]"]]:
    """A collector that samples a group, once all responses are open."""
    outbox = Outbox()
    collector = await asyncio.to_thread(Collector, 0, large_configuration(num_experts), outbox.put)
    async with short_steps():
        await collector.handle(request)
        deadline = time.monotonic() + 30
        while len(engines.continued) < SAMPLES and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
    assert len(engines.continued) == SAMPLES
    yield collector, outbox
    await collector.close()


async def store(
    collector: Collector, outbox: "asyncio.Queue[FromCollector]"
) -> tuple[Group, list[Rollout]]:
    async with short_steps():
        await collector.handle(Store(1))
        messages = [await asyncio.wait_for(outbox.get(), 30) for _ in range(2)]
    partial, end = messages
    assert isinstance(partial, Partial) and partial.group is not None
    assert end == Partial(1, None)
    return partial.group, [read_rollout(ref) for ref in partial.group.rollouts]


async def store_twice(
    engines: OpenResponses, num_experts: int, dtype: type, folder: Path
) -> list[tuple[Group, list[Rollout]]]:
    """Store a group, save it in a folder, and store it again in a collector that restores it."""
    async with opened(engines, REQUEST, num_experts) as (collector, outbox):
        first = await store(collector, outbox)
    start = save_group(folder, *first)
    engines.continued.clear()
    request = msgspec.structs.replace(REQUEST, start=start.group, saved=start.rollouts)
    async with opened(engines, request, num_experts) as (collector, outbox):
        for pieces in engines.continued.values():
            assert pieces[0].routes is not None and pieces[0].routes.dtype == dtype
        return [first, await store(collector, outbox)]


def check(rollout: Rollout, dtype: type) -> None:
    assert rollout.routes is not None and rollout.routes.dtype == dtype
    assert rollout.num_tokens == len(PROMPT.token_ids) + PIECES * TOKENS


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_experts", "dtype"), [(128, np.uint8), (300, np.uint16)], ids=["128", "300"]
)
def test_the_collector_goes_on_while_it_stores_and_restores_large_open_responses(
    num_experts: int, dtype: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats go on, too, and what is restored is stored again as it was."""
    engines = OpenResponses(num_experts=num_experts)
    install(engines, monkeypatch)
    results = asyncio.run(store_twice(engines, num_experts, dtype, tmp_path))
    for group, rollouts in results:
        assert group.open_samples == tuple(range(SAMPLES)) and len(rollouts) == SAMPLES
    for rollout, twin in zip(results[0][1], results[1][1], strict=True):
        check(rollout, dtype)
        assert_equal(rollout, twin)


@pytest.fixture
def small_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorHub]:
    """A hub that accepts messages of 64 KiB."""
    monkeypatch.setattr("megatron_rl.rollouts.queue.hub.MAX_MESSAGE_BYTES", 2**16)
    hub = CollectorHub("127.0.0.1", silence_seconds=5.0)
    yield hub
    hub.close()


def test_open_groups_that_exceed_a_message_together_arrive(
    small_hub: CollectorHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group with its prompt fits in a message, as the answer to its request does."""
    install(OpenResponses(tokens=4), monkeypatch)
    host, port = small_hub.address
    stop = threading.Event()

    async def collect() -> None:
        link = CollectorLink(host, port, node=0, epoch=0, run_key=small_hub.run_key)
        serving = asyncio.create_task(serve(link, 0))
        await asyncio.to_thread(stop.wait, 30)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        link.close()

    thread = threading.Thread(target=asyncio.run, args=(collect(),))
    thread.start()
    try:
        small_hub.wait_for(1, 20)
        queue = RolloutQueue(small_hub, RolloutSettings(max_new_tokens=4))
        queue.configure({0: large_configuration(128)})
        prompt = Prompt(id="p", token_ids=(7,) * 8000, answer="1", task="t")
        queue.submit(
            [
                GroupRequest(group_id=f"g{n}", prompt=prompt, num_samples=1, sampling=SAMPLING)
                for n in range(40)
            ]
        )
        queue.send_waiting()
        groups = queue.store_partials(timeout_seconds=20)
    finally:
        stop.set()
        thread.join()
    assert {group.group_id for group in groups} == {f"g{n}" for n in range(40)}
    assert len(msgspec.msgpack.encode(groups)) > 4 * 2**16
