"""A hold: nothing is requested, and running responses wait in the middle."""

import asyncio
import base64
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector.collector import Collector
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.wire.messages import (
    AbortRequests,
    Drop,
    EngineLeftOut,
    FromCollector,
    GroupRequest,
    Served,
)
from sglang_bridge.engine import Engine
from sglang_bridge.generation import FinishReason, Generation, VersionSpan
from tests.support.collectors import Outbox
from tests.support.fake_engine import LAYERS, TOPK, Reply, configuration, fake_engine, hold, serving
from tests.support.scripted_model import EOS, PROMPT, TOKENIZER

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
FORM = RequestForm(api_key=None, longest_response=10, route_shape=(LAYERS, TOPK), vocab_size=48)
WHOLE = [*TOKENIZER.encode("04678"), EOS]


class InterruptedEngine:
    """Answers the first request with its first tokens and ABORT, and the next with the rest."""

    def __init__(self, num_first: int) -> None:
        self.num_first = num_first
        self.version = 3
        self.bodies: list[dict[str, Any]] = []

    def __call__(self, n: int, body: Reply) -> Reply:
        self.bodies.append(body)
        num_sampled = len(body["input_ids"]) - len(PROMPT.token_ids)
        ids = WHOLE[num_sampled:] if n else WHOLE[: self.num_first]
        num_rows = len(body["input_ids"]) + len(ids) - 1 - body.get("routed_experts_start_len", 0)
        rows = np.full((num_rows, LAYERS, TOPK), n, np.int32)
        rows[:, :, 1] += 2
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop" if n else "abort"},
                "weight_version": str(self.version),
                "output_token_logprobs": [(-0.5 - n, token, None) for token in ids],
                "routed_experts": base64.b64encode(rows.tobytes()).decode(),
            },
        }


async def ignore(message: FromCollector) -> None:
    """Drop a report."""


def generate(
    pool: EnginePool, rejected_tokens: Counter[str] | None = None
) -> asyncio.Task[Generation]:
    return asyncio.create_task(
        pool.generate(
            PROMPT.token_ids,
            SAMPLING,
            rid="r",
            return_routes=True,
            rejected_tokens=Counter() if rejected_tokens is None else rejected_tokens,
            seed=11,
        )
    )


def interrupt(engine: InterruptedEngine) -> Generation:
    """Interrupt a response, let it go on, and return it."""

    async def run() -> Generation:
        async with fake_engine(engine, seconds=0.2) as url:
            pool = EnginePool(EngineSettings(), FORM, ignore)
            await pool.set_engines([Engine(url=url)])
            task = generate(pool)
            await asyncio.sleep(0.05)
            await asyncio.wait_for(hold(pool), 5)
            await asyncio.sleep(0.1)
            assert not task.done() and len(engine.bodies) == 1
            engine.version = 4
            pool.set_version(4)
            pool.proceed()
            generation = await asyncio.wait_for(task, 5)
            await pool.close()
            return generation

    return asyncio.run(run())


def test_an_interrupted_response_goes_on_with_its_seed_and_tokens() -> None:
    engine = InterruptedEngine(2)
    generation = interrupt(engine)
    assert generation.output_ids.tolist() == WHOLE
    assert generation.finish_reason is FinishReason.STOP
    assert generation.version_spans == (VersionSpan("3", 0, 2), VersionSpan("4", 2, 6))
    first, second = engine.bodies
    assert second["input_ids"] == [*PROMPT.token_ids, *WHOLE[:2]]
    assert second["sampling_params"]["sampling_seed"] == 11
    assert second["sampling_params"]["max_new_tokens"] == 14
    num_first_rows = len(PROMPT.token_ids) + 1
    assert second["routed_experts_start_len"] == num_first_rows
    assert "routed_experts_start_len" not in first
    assert generation.routes is not None
    assert len(generation.routes) == len(PROMPT.token_ids) + len(WHOLE) - 1
    assert (generation.routes[:num_first_rows, :, 0] == 0).all()
    assert (generation.routes[num_first_rows:, :, 0] == 1).all()


def test_a_response_without_a_token_begins_again() -> None:
    engine = InterruptedEngine(0)
    generation = interrupt(engine)
    assert generation.output_ids.tolist() == WHOLE
    assert engine.bodies[1]["input_ids"] == list(PROMPT.token_ids)


def test_a_response_that_ends_during_a_hold_is_complete_and_the_next_one_waits() -> None:
    engine = InterruptedEngine(2)
    engine.num_first = len(WHOLE)

    async def run() -> None:
        async with fake_engine(lambda n, body: engine(1, body), seconds=0.2) as url:
            pool = EnginePool(EngineSettings(), FORM, ignore)
            await pool.set_engines([Engine(url=url)])
            task = generate(pool)
            await asyncio.sleep(0.05)
            await asyncio.wait_for(hold(pool), 5)
            assert (await asyncio.wait_for(task, 1)).output_ids.tolist() == WHOLE
            waiting = generate(pool)
            await asyncio.sleep(0.3)
            assert not waiting.done() and len(engine.bodies) == 1
            pool.proceed()
            await asyncio.wait_for(waiting, 5)
            await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("proceeds", [False, True])
def test_an_engine_that_does_not_stop_is_left_out_unless_the_hold_is_over(
    proceeds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_rl.rollouts.collector.engines.engine_pool.STOP_SECONDS", 0.3)
    slow_seconds = 1.0 if proceeds else 30.0
    whole_engine = InterruptedEngine(len(WHOLE))
    reports: list[FromCollector] = []

    async def report(message: FromCollector) -> None:
        reports.append(message)

    def answer(n: int, body: Reply) -> Reply:
        return whole_engine(1, body)

    async def run() -> None:
        async with fake_engine(answer, seconds=slow_seconds) as slow, fake_engine(answer) as fast:
            pool = EnginePool(EngineSettings(), FORM, report)
            await pool.set_engines([Engine(url=slow)])
            task = generate(pool)
            await asyncio.sleep(0.05)
            pause = asyncio.create_task(hold(pool))
            if proceeds:
                await asyncio.sleep(0.1)
                pool.proceed()
            else:
                await asyncio.wait_for(pause, 8)
                await pool.set_engines([Engine(url=slow), Engine(url=fast)])
                pool.proceed()
            generation = await asyncio.wait_for(task, 5)
            assert generation.output_ids.tolist() == WHOLE
            await pause
            left_out = [m.url for m in reports if isinstance(m, EngineLeftOut)]
            assert left_out == ([] if proceeds else [slow])
            await pool.close()

    asyncio.run(run())


def test_a_hold_that_is_over_leaves_no_engine_out_during_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = "megatron_rl.rollouts.collector.engines.engine_pool.STOP_SECONDS"
    whole_engine = InterruptedEngine(len(WHOLE))
    reports: list[FromCollector] = []

    async def report(message: FromCollector) -> None:
        reports.append(message)

    async def run() -> None:
        async with fake_engine(lambda n, body: whole_engine(1, body), seconds=1.0) as url:
            pool = EnginePool(EngineSettings(), FORM, report)
            await pool.set_engines([Engine(url=url)])
            task = generate(pool)
            await asyncio.sleep(0.05)
            monkeypatch.setattr(seconds, 0.3)
            first_hold = asyncio.create_task(hold(pool))
            await asyncio.sleep(0.05)
            pool.proceed()
            monkeypatch.setattr(seconds, 60.0)
            await asyncio.wait_for(hold(pool), 5)
            assert (await task).output_ids.tolist() == WHOLE
            await first_hold
            assert reports == []
            await pool.close()

    asyncio.run(run())


def generate_under_aborts(num_aborts: int, num_tokens: int) -> tuple[Generation, int]:
    """Sample a response while somebody else aborts it.

    num_aborts: how often. num_tokens: of each piece. Returns the response and the number of
    requests.
    """
    engine = InterruptedEngine(num_tokens)

    def answer(n: int, body: Reply) -> Reply:
        reply = engine(n, body)
        if n < num_aborts:
            reply = InterruptedEngine(num_tokens)(0, body)
        return reply

    async def run() -> Generation:
        async with fake_engine(answer) as url:
            pool = EnginePool(EngineSettings(), FORM, ignore)
            await pool.set_engines([Engine(url=url)])
            generation = await asyncio.wait_for(generate(pool), 5)
            await pool.close()
            return generation

    return asyncio.run(run()), len(engine.bodies)


def test_a_response_that_somebody_else_aborts_goes_on() -> None:
    generation, num_requests = generate_under_aborts(1, 2)
    assert generation.output_ids.tolist() == WHOLE
    assert generation.finish_reason is FinishReason.STOP
    assert num_requests == 2


def test_aborted_tokens_without_routes_are_sampled_again() -> None:
    """SGLang sends them after a retraction. The whole response needs their routes."""
    engine = InterruptedEngine(2)
    rejected = Counter[str]()

    def answer(n: int, body: Reply) -> Reply:
        reply = engine(n, body)
        if not n:
            del reply["meta_info"]["routed_experts"]
        return reply

    async def run() -> Generation:
        async with fake_engine(answer) as url:
            pool = EnginePool(EngineSettings(), FORM, ignore)
            await pool.set_engines([Engine(url=url)])
            generation = await asyncio.wait_for(generate(pool, rejected), 5)
            assert pool.num_sampled == 2 + len(WHOLE)
            await pool.close()
            return generation

    generation = asyncio.run(run())
    assert generation.output_ids.tolist() == WHOLE
    assert generation.routes is not None
    assert len(generation.routes) == len(PROMPT.token_ids) + len(WHOLE) - 1
    assert rejected == {"aborted_without_routes": 2}
    assert engine.bodies[1]["input_ids"] == list(PROMPT.token_ids)


def test_a_hold_does_not_wait_for_requests_that_were_withdrawn() -> None:
    async def run() -> None:
        async with fake_engine(lambda n, body: None) as url:
            outbox = Outbox()
            collector = Collector(0, configuration(), outbox.put)
            await collector.handle(serving(url))
            await collector.handle(
                GroupRequest(group_id="g", prompt=PROMPT, num_samples=2, sampling=SAMPLING)
            )
            await asyncio.sleep(0.2)
            await collector.handle(Drop(("g",)))
            await collector.handle(serving(url, is_paused=True))
            answer = await asyncio.wait_for(outbox.get(), 5)
            assert answer == Served(0, 1, engines_idle=answer.engines_idle)
            await collector.close()

    asyncio.run(run())


@pytest.mark.parametrize("num_aborts", [9, 10])
def test_a_response_that_gets_no_token_is_given_up(num_aborts: int) -> None:
    generation, num_requests = generate_under_aborts(num_aborts, 0)
    assert num_requests == 10
    is_whole = num_aborts == 9
    assert generation.output_ids.tolist() == (WHOLE if is_whole else [])
    assert generation.finish_reason is (FinishReason.STOP if is_whole else FinishReason.ABORT)


def test_a_response_of_a_silent_engine_does_not_go_on() -> None:
    """Its engine answers nothing until rank 0 aborts the request."""
    messages: list[FromCollector] = []

    async def report(message: FromCollector) -> None:
        messages.append(message)

    async def run() -> Generation:
        settings = EngineSettings(request_timeout_s=0.3)
        form = replace(FORM, longest_response=1)
        async with fake_engine(InterruptedEngine(2), seconds=0.5) as url:
            pool = EnginePool(settings, form, report)
            await pool.set_engines([Engine(url=url)])
            generation = await asyncio.wait_for(generate(pool), 5)
            await pool.close()
            return generation

    generation = asyncio.run(run())
    assert [type(message) for message in messages] == [AbortRequests]
    assert generation.finish_reason is FinishReason.ABORT
    assert generation.output_ids.tolist() == WHOLE[:2]
