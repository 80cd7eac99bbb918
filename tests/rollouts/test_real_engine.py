"""What a collector asks of engines, asked of a real one: seeds, and aborts at a deadline."""

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Sequence

import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.models.families import read_shape
from megatron_rl.rollouts.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.messages import AbortRequest, FromCollector
from sglang_bridge.client import GenerateClient, RequestExpired
from sglang_bridge.engine import Engine
from sglang_bridge.generation import FinishReason, Generation
from sglang_bridge.server.managed_engine import ManagedEngine
from tests.support.engines import running_engine
from tests.support.exactness import EXACT
from tests.support.scripted_model import CHECKPOINT, PROMPT, TOKENIZER

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]
SHAPE = read_shape(CHECKPOINT)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ManagedEngine]:
    with running_engine(CHECKPOINT, tmp_path_factory.mktemp("engine")) as running:
        yield running


def admin(engine: ManagedEngine, path: str, body: dict) -> None:
    headers = {
        "Content-Type": "application/json",
        "Authorization": f"Bearer {engine.keys.admin_api_key}",
    }
    urllib.request.urlopen(
        urllib.request.Request(engine.url + path, json.dumps(body).encode(), headers), timeout=30
    )


def test_a_seed_draws_the_same_response_whatever_is_drawn_beside_it(engine: ManagedEngine) -> None:
    """Tokens, log-probabilities and routes: of 300 at a time, then of 7 in another order, with
    cached prompts.
    """
    prompts = [TOKENIZER.encode(f"{10 + i % 80}+{99 - i % 37}=") for i in range(200)]

    async def draw(order: Sequence[int], at_a_time: int) -> dict[int, tuple[bytes, bytes, bytes]]:
        slots, drawn = asyncio.Semaphore(at_a_time), {}
        shape = (SHAPE.num_layers, SHAPE.topk)
        async with GenerateClient(
            engine.url, api_key=engine.keys.api_key, route_shape=shape
        ) as client:

            async def one(i: int) -> None:
                async with slots:
                    sampling = Sampling(max_new_tokens=(20, 20, 20, 300)[i % 4], temperature=10.0)
                    done = await client.generate(
                        prompts[i], sampling, rid=f"s{i}", return_routes=True, seed=i << 40
                    )
                assert done.routes is not None
                drawn[i] = done.output_ids.tobytes(), done.logprobs.tobytes(), done.routes.tobytes()

            await asyncio.gather(*(one(i) for i in order))
        return drawn

    order = list(range(len(prompts)))
    together = asyncio.run(draw(order, 300))
    assert len({ids for ids, _, _ in together.values()}) > 150
    other = asyncio.run(draw(order[::-1], 7))
    different = [i for i in order if together[i] != other[i]]
    assert not different if EXACT else sum(together[i][0] != other[i][0] for i in different) <= 2


def test_what_runs_at_its_deadline_is_kept_with_its_routes_and_the_engine_goes_on(
    engine: ManagedEngine,
) -> None:
    """The engine is paused while it generates: it falls silent, every request expires, is aborted
    and answered.
    """
    aborted: list[str] = []
    requests: list[asyncio.Task[Generation]] = []
    went_on = False

    async def tell(message: FromCollector) -> None:
        nonlocal went_on
        if isinstance(message, AbortRequest):
            await asyncio.to_thread(admin, engine, "/abort_request", {"rid": message.rid})
            aborted.append(message.rid)
            # Going on before the last is aborted would let the others end by themselves.
            if not went_on and len(aborted) >= sum(not request.done() for request in requests):
                went_on = True
                await asyncio.to_thread(admin, engine, "/continue_generation", {})

    async def run() -> list[Generation | BaseException]:
        form = RequestForm(
            api_key=engine.keys.api_key,
            longest_response=1,
            route_shape=(SHAPE.num_layers, SHAPE.topk),
            vocab_size=SHAPE.vocab_size,
        )
        settings = EngineSettings(request_timeout_s=4.0, token_timeout_s=0.0, retries=0)
        pool = EnginePool([Engine(url=engine.url)], settings, form, tell)
        sampling = Sampling(max_new_tokens=100, temperature=5.0)
        requests.extend(
            asyncio.create_task(
                pool.generate(
                    PROMPT.token_ids, sampling, rid=f"r{i}", return_routes=True, seed=2**63 - 1 - i
                )
            )
            for i in range(48)
        )
        answers = asyncio.as_completed(requests)
        for _ in range(6):  # of 48: by then others are in the middle of theirs
            await next(answers)
        await asyncio.to_thread(admin, engine, "/pause_generation", {"mode": "in_place"})
        results = await asyncio.gather(*requests, return_exceptions=True)
        results.append(
            await pool.generate(PROMPT.token_ids, sampling, rid="after", return_routes=True)
        )
        await pool.close()
        return results

    results = asyncio.run(run())
    assert aborted, "no request was running when the engine was paused"
    generations = [result for result in results if isinstance(result, Generation)]
    expired = [
        result for result in results if isinstance(result, RequestExpired)
    ]  # nothing of them was drawn yet
    assert len(generations) + len(expired) == len(results), results
    for generation in generations:
        assert generation.routes is not None
        assert len(generation.routes) == len(PROMPT.token_ids) + len(generation.output_ids) - 1
        assert generation.finish_reason is not FinishReason.ABORT
    cut = [
        generation for generation in generations if generation.finish_reason is FinishReason.LENGTH
    ]
    assert any(0 < len(generation.output_ids) < 100 for generation in cut)
