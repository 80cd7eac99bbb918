"""A response with a budget: some tokens of each version of the weights, then it waits."""

import asyncio
import base64
from collections import Counter

import msgspec
import numpy as np
import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector import Collector
from megatron_rl.rollouts.generation.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.messages import (
    FromCollector,
    GroupDone,
    GroupRequest,
    Held,
    Settle,
    SetVersion,
    VersionBudget,
    Withdraw,
)
from sglang_bridge.engine import Engine
from sglang_bridge.generation import Generation
from tests.support.fake_engine import LAYERS, TOPK, Reply, configuration, fake_engine
from tests.support.scripted_model import EOS, PROMPT, TOKENIZER

FORM = RequestForm(api_key=None, longest_response=10, route_shape=(LAYERS, TOPK), vocab_size=48)
WHOLE = [*TOKENIZER.encode("04678"), EOS]


class VersionedEngine:
    """Answers with the next tokens of one response, in the version that it has."""

    def __init__(self) -> None:
        self.version = 0
        self.limits: list[int] = []

    def __call__(self, n: int, body: Reply) -> Reply:
        limit = body["sampling_params"]["max_new_tokens"]
        self.limits.append(limit)
        start = len(body["input_ids"]) - len(PROMPT.token_ids)
        ids = WHOLE[start : start + limit]
        num_rows = len(body["input_ids"]) + len(ids) - 1 - body.get("routed_experts_start_len", 0)
        rows = np.full((num_rows, LAYERS, TOPK), self.version, np.int32)
        rows[:, :, 1] += 2
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": "stop" if ids[-1] == EOS else "length"},
                "weight_version": str(self.version),
                "output_token_logprobs": [(-0.5, token, None) for token in ids],
                "routed_experts": base64.b64encode(rows.tobytes()).decode(),
            },
        }


async def ignore(message: FromCollector) -> None:
    """Drop a report."""


class AbortedEngine(VersionedEngine):
    """Somebody aborts its first request after one token."""

    def __call__(self, n: int, body: Reply) -> Reply:
        if n:
            return super().__call__(n, body)
        cut_body = {**body, "sampling_params": {**body["sampling_params"], "max_new_tokens": 1}}
        reply = super().__call__(n, cut_body)
        reply["meta_info"]["finish_reason"] = {"type": "abort"}
        return reply


class RetractedEngine(AbortedEngine):
    """Sends its aborted tokens without routes, as SGLang does after a retraction."""

    def __call__(self, n: int, body: Reply) -> Reply:
        reply = super().__call__(n, body)
        if not n:
            del reply["meta_info"]["routed_experts"]
        return reply


async def sample(
    budget: VersionBudget | None,
    versions: list[int],
    *,
    max_new_tokens: int = 16,
    engine: VersionedEngine | None = None,
    rejected_tokens: Counter[str] | None = None,
) -> tuple[Generation, VersionedEngine, list[int]]:
    """Sample a response while the engine gets these versions, each once the response is parked.

    Returns it, the engine, and the number of parked responses before each new version.
    """
    engine = engine or VersionedEngine()
    parked_counts: list[int] = []
    rejected = Counter[str]() if rejected_tokens is None else rejected_tokens
    async with fake_engine(engine) as url:
        pool = EnginePool([Engine(url=url)], EngineSettings(), FORM, ignore)
        pool.set_version(0)
        task = asyncio.create_task(
            pool.generate(
                PROMPT.token_ids,
                Sampling(max_new_tokens=max_new_tokens, temperature=1.0, stop_token_ids=(EOS,)),
                rid="r",
                return_routes=True,
                rejected_tokens=rejected,
                seed=11,
                budget=lambda: budget,
            )
        )
        for version in versions:
            while not pool.num_parked and not task.done():
                await asyncio.sleep(0.01)
            parked_counts.append(pool.num_parked)
            engine.version = version
            pool.set_version(version)
        generation = await asyncio.wait_for(task, 5)
        assert pool.num_parked == 0
        assert pool.num_sampled == len(generation.output_ids) + rejected.total()
        await pool.close()
    return generation, engine, parked_counts


def spans(generation: Generation) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.version_spans]


def test_a_response_waits_for_the_next_version_when_its_budget_is_used_up() -> None:
    generation, engine, parked_counts = asyncio.run(sample(VersionBudget(2, 2), [1, 2]))
    assert generation.output_ids.tolist() == WHOLE
    assert spans(generation) == [("0", 0, 2), ("1", 2, 4), ("2", 4, 6)]
    assert engine.limits == [2, 2, 12]
    assert parked_counts == [1, 1]
    assert generation.finish_reason == "stop"
    assert generation.routes is not None
    # Each piece has the rows of its own reading
    prompt = len(PROMPT.token_ids)
    assert generation.routes[:, 0, 0].tolist() == [0] * (prompt + 1) + [1] * 2 + [2] * 2


def test_a_response_that_ends_within_its_budget_does_not_wait() -> None:
    generation, engine, _ = asyncio.run(sample(VersionBudget(6, 2), []))
    assert spans(generation) == [("0", 0, 6)] and engine.limits == [6]


def test_a_response_whose_step_trains_has_no_limit() -> None:
    generation, engine, _ = asyncio.run(sample(VersionBudget(2, 0), []))
    assert spans(generation) == [("0", 0, 6)] and engine.limits == [16]


@pytest.mark.parametrize("max_new_tokens", [3, 4])
def test_the_limit_of_the_response_ends_it_whatever_its_budget_is(max_new_tokens: int) -> None:
    budget = VersionBudget(2, 9)
    generation, _, parked_counts = asyncio.run(sample(budget, [1], max_new_tokens=max_new_tokens))
    assert generation.output_ids.tolist() == WHOLE[:max_new_tokens]
    assert generation.finish_reason == "length"
    assert parked_counts == [1]


def test_a_budget_of_no_tokens_waits_at_once() -> None:
    generation, engine, parked_counts = asyncio.run(sample(VersionBudget(0, 1), [1]))
    assert spans(generation) == [("1", 0, 6)] and engine.limits == [16] and parked_counts == [1]


def test_a_response_that_is_aborted_gets_the_rest_of_its_budget_alone() -> None:
    generation, engine, _ = asyncio.run(sample(VersionBudget(2, 2), [1, 2], engine=AbortedEngine()))
    assert spans(generation) == [("0", 0, 2), ("1", 2, 4), ("2", 4, 6)]
    assert engine.limits == [1, 1, 2, 12]


@pytest.mark.parametrize(("budget", "limit"), [(None, 16), (VersionBudget(6, 2), 6)])
def test_aborted_tokens_without_routes_are_sampled_again(
    budget: VersionBudget | None, limit: int
) -> None:
    """The rest of the response has no routes for them, so it could not be trained on."""
    rejected = Counter[str]()
    generation, engine, _ = asyncio.run(
        sample(budget, [], engine=RetractedEngine(), rejected_tokens=rejected)
    )
    assert generation.output_ids.tolist() == WHOLE
    assert generation.routes is not None
    assert len(generation.routes) == len(PROMPT.token_ids) + len(WHOLE) - 1
    assert rejected == {"aborted_without_routes": 1}
    assert engine.limits == [1, limit]


async def next_held(outbox: asyncio.Queue[FromCollector]) -> Held:
    """Return the next message, without the time of idle engines."""
    message = await asyncio.wait_for(outbox.get(), 5)
    assert isinstance(message, Held)
    return msgspec.structs.replace(message, engines_idle=0.0)


def test_a_collector_settles_once_every_response_has_ended_or_waits() -> None:
    """Also for requests that have just arrived, and for responses that have just been let go."""
    sampling = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
    request = GroupRequest(
        group_id="g", prompt=PROMPT, num_samples=3, sampling=sampling, budget=VersionBudget(2, 2)
    )

    async def run() -> None:
        engine = VersionedEngine()
        async with fake_engine(engine, seconds=0.05) as url:
            outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
            collector = Collector(0, configuration(url), outbox.put)
            await collector.handle(SetVersion(0))
            await collector.handle(request)
            await collector.handle(Settle(1))
            assert await next_held(outbox) == Held(3, 6, 6, 1)
            engine.version = 1
            await collector.handle(SetVersion(1))
            await collector.handle(Settle(2))
            assert await next_held(outbox) == Held(3, 12, 12, 2)
            engine.version = 2
            await collector.handle(SetVersion(2))
            answer = await asyncio.wait_for(outbox.get(), 5)
            await collector.handle(Settle(3))
            assert await next_held(outbox) == Held(0, 0, 18, 3)
            assert_two_tokens_of_each_version(answer)
            await collector.close()

    asyncio.run(run())


def assert_two_tokens_of_each_version(message: FromCollector) -> None:
    assert isinstance(message, GroupDone)
    assert message.generated_tokens == 18
    (tokens,) = {rollout.tokens_by_version for rollout in message.group.rollouts}
    assert tokens == ((0, 2), (1, 2), (2, 2))


def test_a_collector_does_not_wait_for_requests_that_were_withdrawn() -> None:
    async def run() -> None:
        async with fake_engine(lambda n, body: Exception("never"), seconds=60) as url:
            outbox: asyncio.Queue[FromCollector] = asyncio.Queue()
            collector = Collector(0, configuration(url), outbox.put)
            sampling = Sampling(max_new_tokens=4, temperature=1.0)
            await collector.handle(
                GroupRequest(group_id="g", prompt=PROMPT, num_samples=2, sampling=sampling)
            )
            await collector.handle(Withdraw(("g",)))
            await collector.handle(Settle(4))
            assert await next_held(outbox) == Held(0, 0, 0, 4)
            await collector.close()

    asyncio.run(run())
