"""Requests of a collector to a real engine: seeds, and aborts at a deadline."""

import asyncio
import dataclasses
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.engines.token_counter import TokenCounter
from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.wire.messages import AbortRequests, FromCollector
from sglang_bridge.client import GenerateClient, RequestExpired
from sglang_bridge.engine import Engine
from sglang_bridge.generation import FinishReason, Generation
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.support.engines import running_engine
from tests.support.exactness import EXACT
from tests.support.scripted_model import CHECKPOINT, PROMPT, TOKENIZER

pytestmark = [pytest.mark.nightly, pytest.mark.engine, pytest.mark.timeout(400)]
SHAPE = read_shape(CHECKPOINT)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedEngine]:
    with running_engine(CHECKPOINT, tmp_path_factory.mktemp("engine")) as running:
        yield running


def call_admin(engine: ManagedEngine, path: str, body: dict) -> None:
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {engine.keys.admin_api_key}",
    }
    urllib.request.urlopen(
        urllib.request.Request(engine.url + path, json.dumps(body).encode(), headers), timeout=30
    )


async def sample_with_seeds(
    engine: ManagedEngine, prompts: Sequence[list[int]], order: Sequence[int], at_a_time: int
) -> dict[int, tuple[bytes, bytes, bytes]]:
    """Sample one response to each prompt, whose seed follows from its index.

    Returns tokens, log-probabilities and routes by index.
    """
    slots = asyncio.Semaphore(at_a_time)
    responses: dict[int, tuple[bytes, bytes, bytes]] = {}
    shape = (SHAPE.num_layers, SHAPE.topk)
    client = GenerateClient(engine.url, api_key=engine.keys.api_key, route_shape=shape)

    async def sample_one(index: int) -> None:
        max_new_tokens = (20, 20, 20, 300)[index % 4]
        sampling = Sampling(max_new_tokens=max_new_tokens, temperature=10.0)
        async with slots:
            generation = await client.generate(
                prompts[index], sampling, rid=f"s{index}", return_routes=True, seed=index << 40
            )
        assert generation.routes is not None
        arrays = (generation.output_ids, generation.logprobs, generation.routes)
        tokens, logprobs, routes = (array.tobytes() for array in arrays)
        responses[index] = tokens, logprobs, routes

    async with client:
        await asyncio.gather(*(sample_one(index) for index in order))
    return responses


def test_a_seed_gives_the_same_response_whatever_else_is_running(engine: ManagedEngine) -> None:
    """300 requests at a time, then 7 in another order with cached prompts."""
    prompts = [TOKENIZER.encode(f"{10 + i % 80}+{99 - i % 37}=") for i in range(200)]
    order = list(range(len(prompts)))
    first = asyncio.run(sample_with_seeds(engine, prompts, order, 300))
    assert len({tokens for tokens, _, _ in first.values()}) > 150
    second = asyncio.run(sample_with_seeds(engine, prompts, order[::-1], 7))
    different = [i for i in order if first[i] != second[i]]
    if EXACT:
        assert not different
    else:
        assert sum(first[i][0] != second[i][0] for i in different) <= 2


@dataclasses.dataclass
class PausedEngine:
    """Reports of a pool to an engine that is paused until all running requests are aborted."""

    engine: ManagedEngine
    aborts: list[str] = dataclasses.field(default_factory=list)
    requests: list[asyncio.Task[Generation]] = dataclasses.field(default_factory=list)
    is_resumed: bool = False

    async def handle(self, message: FromCollector) -> None:
        if not isinstance(message, AbortRequests):
            return
        for name in message.names:
            await asyncio.to_thread(call_admin, self.engine, "/abort_request", {"rid": name})
        self.aborts.extend(message.names)
        # If the engine resumed before the last abort, the other requests would end by themselves
        num_running = sum(not request.done() for request in self.requests)
        if not self.is_resumed and len(self.aborts) >= num_running:
            self.is_resumed = True
            await asyncio.to_thread(call_admin, self.engine, "/continue_generation", {})

    async def run(self, pool: EnginePool, attempt: int) -> list[Generation | BaseException]:
        """Run 48 requests, pause the engine during them, and run one more after that."""
        sampling = Sampling(max_new_tokens=100, temperature=5.0)
        for index in range(48):
            seed = 2**63 - 1 - 48 * attempt - index
            request = pool.generate(
                PROMPT.token_ids,
                sampling,
                rid=f"r{attempt}.{index}",
                return_routes=True,
                rejected_tokens=Counter(),
                seed=seed,
            )
            self.requests.append(asyncio.create_task(request))
        completions = asyncio.as_completed(self.requests)
        for _ in range(6):  # of 48, so that others are still running
            await next(completions)
        await asyncio.to_thread(call_admin, self.engine, "/pause_generation", {"mode": "in_place"})
        results = await asyncio.gather(*self.requests, return_exceptions=True)
        results.append(
            await pool.generate(
                PROMPT.token_ids,
                sampling,
                rid="after",
                return_routes=True,
                rejected_tokens=Counter(),
            )
        )
        await pool.close()
        return results


def test_the_engine_counts_the_tokens_of_responses_that_are_rejected(
    engine: ManagedEngine,
) -> None:
    """A vocabulary that is too small rejects many responses, and each is sampled twice."""
    form = RequestForm(
        api_key=engine.keys.api_key, longest_response=40, route_shape=None, vocab_size=40
    )
    sampling = Sampling(max_new_tokens=40, temperature=30.0)
    rejected_tokens = Counter[str]()

    async def ignore(message: FromCollector) -> None:
        pass

    pool = EnginePool(EngineSettings(), form, ignore)

    async def run() -> list[Generation | BaseException]:
        await pool.set_engines([Engine(url=engine.url)])
        requests = [
            pool.generate(
                PROMPT.token_ids,
                sampling,
                rid=f"v{index}",
                return_routes=False,
                rejected_tokens=rejected_tokens,
                seed=index,
            )
            for index in range(100)
        ]
        results = await asyncio.gather(*requests, return_exceptions=True)
        await pool.close()
        return results

    counter = TokenCounter([engine.admin()], log=pytest.fail)
    generations = [r for r in asyncio.run(run()) if isinstance(r, Generation)]
    used_tokens = sum(len(generation.output_ids) for generation in generations)
    assert 0 < len(generations) < 100 and rejected_tokens.keys() == {"token_range"}
    comparison = counter.compare(used_tokens + rejected_tokens.total())
    assert comparison is not None and comparison.uncounted_tokens == 0
    assert comparison.engine_tokens > 2 * used_tokens


def test_requests_at_their_deadline_are_aborted_with_their_tokens(
    engine: ManagedEngine,
) -> None:
    """A paused engine is silent, so that every request expires and is aborted and answered.

    On a busy machine, all responses may end before the pause arrives. Then this is tried again.
    """
    for attempt in range(5):
        results = pause_engine_during_requests(engine, attempt)
        generations = [result for result in results if isinstance(result, Generation)]
        # These requests had no token yet
        num_expired = sum(isinstance(result, RequestExpired) for result in results)
        assert len(generations) + num_expired == len(results), results
        if check_aborted_generations(generations):
            return
    pytest.fail("no response was aborted with a part of its tokens")


def pause_engine_during_requests(
    engine: ManagedEngine, attempt: int
) -> list[Generation | BaseException]:
    """Pause an engine until the deadline of all requests. Returns their answers and failures."""
    paused_engine = PausedEngine(engine)
    form = RequestForm(
        api_key=engine.keys.api_key,
        longest_response=1,
        route_shape=(SHAPE.num_layers, SHAPE.topk),
        vocab_size=SHAPE.vocab_size,
    )
    settings = EngineSettings(request_timeout_s=10.0)

    async def run() -> list[Generation | BaseException]:
        pool = EnginePool(settings, form, paused_engine.handle)
        await pool.set_engines([Engine(url=engine.url)])
        async with asyncio.timeout(60):
            return await paused_engine.run(pool, attempt)

    counter = TokenCounter([engine.admin()], log=pytest.fail)
    results = asyncio.run(run())
    comparison = counter.compare(
        sum(len(result.output_ids) for result in results if isinstance(result, Generation))
    )
    assert comparison is not None and comparison.engine_tokens > 0
    assert comparison.uncounted_tokens == 0, "tokens of aborted requests are counted, too"
    return results


def check_aborted_generations(generations: Sequence[Generation]) -> int:
    """Check that aborted responses have a part of their tokens, and others have their routes.

    Returns the number of aborted responses.
    """
    num_aborted = 0
    for generation in generations:
        if generation.finish_reason is FinishReason.ABORT:
            num_aborted += 1
            assert 0 < len(generation.output_ids) < 100
        else:
            assert generation.routes is not None
            assert len(generation.routes) == len(PROMPT.token_ids) + len(generation.output_ids) - 1
    return num_aborted
