"""The engine pool: balance, retries, and engines that are left out."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator

import pytest

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.messages import AbortRequest, EngineBack, EngineLeftOut, FromCollector
from sglang_bridge.engine import Engine
from tests.support.fake_engine import LAYERS, TOPK, Answer, Reply, fake_engine, reply
from tests.support.scripted_model import EOS, PROMPT

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
FORM = RequestForm(api_key=None, longest_response=10, route_shape=(LAYERS, TOPK), vocab_size=48)


class CountingEngine:
    """Counts the requests that an engine answers."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls = 0

    def __call__(self, n: int, body: Reply) -> Reply | int | None:
        self.calls += 1
        return self.answer(n, body)


def good(n: int, body: Reply) -> Reply:
    return reply(body, "046")


def failing(n: int, body: Reply) -> int:
    return 500


def silent(n: int, body: Reply) -> None:
    return None


@contextlib.asynccontextmanager
async def pool_of(
    *answers: Answer, **settings: object
) -> AsyncIterator[tuple[EnginePool, list[FromCollector], list[str]]]:
    """Open a pool of engines, and yield it with its reports and the URLs of the engines.

    answers: of each engine.
    """
    messages: list[FromCollector] = []

    async def report(message: FromCollector) -> None:
        messages.append(message)

    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(fake_engine(answer)) for answer in answers]
        pool = EnginePool(
            [Engine(url=url) for url in urls], EngineSettings(**settings), FORM, report
        )  # type: ignore[arg-type]
        try:
            yield pool, messages, urls
        finally:
            await pool.close()


@pytest.fixture(autouse=True)
def quick_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for aborts, which these engines do not support."""
    monkeypatch.setattr("sglang_bridge.client._ABORT_SECONDS", 0.05)


async def generate_many(
    pool: EnginePool, count: int, rejected_tokens: Counter[str] | None = None
) -> Counter[str]:
    """Run requests at once and count their finish reasons and the names of their errors.

    rejected_tokens: receives the tokens of responses that cannot be used.
    """
    tokens = Counter[str]() if rejected_tokens is None else rejected_tokens
    requests = [
        pool.generate(
            PROMPT.token_ids,
            SAMPLING,
            rid=f"r{i}",
            return_routes=True,
            rejected_tokens=tokens,
        )
        for i in range(count)
    ]
    results = await asyncio.gather(*requests, return_exceptions=True)
    return Counter(
        type(r).__name__ if isinstance(r, BaseException) else r.finish_reason for r in results
    )


def test_requests_in_flight_are_bounded() -> None:
    in_flight = 0
    largest = 0

    async def run() -> None:
        nonlocal in_flight, largest
        async with pool_of(good, max_running_requests=2) as (pool, _, _):
            client = pool._members[0].client
            original = client.generate

            async def count(*args: object, **kwargs: object) -> object:
                nonlocal in_flight, largest
                in_flight += 1
                largest = max(largest, in_flight)
                try:
                    return await original(*args, **kwargs)  # type: ignore[arg-type]
                finally:
                    in_flight -= 1

            client.generate = count  # type: ignore[method-assign, assignment]
            assert await generate_many(pool, 10) == {"stop": 10}

    asyncio.run(run())
    assert largest == 4  # two for each that the engine can run


@pytest.mark.parametrize("retries", [0, 2])
def test_no_rollout_is_lost_while_one_of_two_engines_fails(
    retries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The bad engine fails fast, so it always has the fewest requests in flight."""
    bad_engine = CountingEngine(failing)

    async def run() -> None:
        async with pool_of(bad_engine, good, retries=retries, max_running_requests=8) as (
            pool,
            messages,
            urls,
        ):
            pool._members[0].pause = 60.0  # so that it does not come back during the test
            assert await generate_many(pool, 128) == {"stop": 128}
            (message,) = messages
            assert (
                isinstance(message, EngineLeftOut)
                and message.url == urls[0]
                and "500" in message.reason
            )
            assert f"{urls[0]} is left out after 3 failures in a row" in caplog.text

    asyncio.run(run())
    assert bad_engine.calls <= 32  # some were in flight when it was left out


def test_no_rollout_is_lost_while_one_of_two_engines_is_invalid() -> None:
    async def run() -> None:
        invalid = CountingEngine(lambda n, body: reply(body, "046", output_token_logprobs=[]))
        tokens = Counter[str]()
        async with pool_of(invalid, good, max_running_requests=8) as (pool, messages, _):
            pool._members[0].pause = 60.0
            assert await generate_many(pool, 128, tokens) == {"stop": 128}
            assert [type(m) for m in messages] == [EngineLeftOut] and invalid.calls <= 32
        assert tokens == {"logprobs_length": 4 * invalid.calls}

    asyncio.run(run())


def test_invalid_responses_of_all_engines_are_sampled_twice_at_most() -> None:
    """With NaN weights every further response would be invalid too."""

    async def run() -> None:
        engines = [
            CountingEngine(lambda n, body: reply(body, "046", output_token_logprobs=[]))
            for _ in range(4)
        ]
        tokens = Counter[str]()
        async with pool_of(*engines, retries=5) as (pool, _, _):
            assert await generate_many(pool, 16, tokens) == {"GenerationRejected": 16}
            assert sum(engine.calls for engine in engines) == 32
        assert tokens == {"logprobs_length": 4 * 32}

    asyncio.run(run())


def test_the_only_engine_is_retried_a_limited_number_of_times() -> None:
    async def run() -> None:
        flaky = CountingEngine(lambda n, body: 503 if n < 2 else reply(body, "046"))
        async with pool_of(flaky, retries=2) as (pool, messages, _):
            assert await generate_many(pool, 1) == {"stop": 1}
            assert messages == []  # the last engine is never left out
        dead = CountingEngine(failing)
        async with pool_of(dead, retries=3) as (pool, messages, _):
            assert await generate_many(pool, 1) == {"RequestFailed": 1}
            assert dead.calls == 4 and messages == []

    asyncio.run(run())


def test_a_request_fails_only_after_all_engines_failed() -> None:
    async def run() -> None:
        engines = [CountingEngine(failing) for _ in range(3)]
        async with pool_of(*engines, retries=1) as (pool, _, _):
            assert await generate_many(pool, 1) == {"RequestFailed": 1}
            assert [engine.calls for engine in engines] == [2, 2, 2]

    asyncio.run(run())


def test_an_invalid_request_is_not_repeated_and_excludes_no_engine() -> None:
    async def run() -> None:
        engines = [CountingEngine(lambda n, body: 400) for _ in range(2)]
        async with pool_of(*engines, retries=5) as (pool, messages, _):
            assert await generate_many(pool, 8) == {"RequestFailed": 8}
            assert sum(engine.calls for engine in engines) == 8 and messages == []

    asyncio.run(run())


def test_an_engine_that_is_healthy_again_is_used_again() -> None:
    works = healthy = False

    async def run() -> None:
        nonlocal works, healthy
        recovering = CountingEngine(lambda n, body: reply(body, "046") if works else 500)
        messages: list[FromCollector] = []

        async def report(message: FromCollector) -> None:
            messages.append(message)

        async with (
            fake_engine(recovering, healthy=lambda: healthy) as sick_url,
            fake_engine(good) as healthy_url,
        ):
            pool = EnginePool(
                [Engine(url=sick_url), Engine(url=healthy_url)],
                EngineSettings(max_running_requests=1),
                FORM,
                report,
            )
            pool._members[0].pause = 0.1
            await generate_many(pool, 16)
            calls = recovering.calls
            await asyncio.sleep(0.5)
            assert (
                await generate_many(pool, 16) == {"stop": 16} and recovering.calls == calls
            )  # it is not healthy yet
            works = healthy = True
            while not isinstance(messages[-1], EngineBack):
                await asyncio.sleep(0.05)
            assert await generate_many(pool, 16) == {"stop": 16} and recovering.calls > calls
            assert [type(m) for m in messages] == [EngineLeftOut, EngineBack]
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_requests_of_a_silent_engine_go_to_another() -> None:
    async def run() -> None:
        async with pool_of(silent, good, request_timeout_s=1.5, token_timeout_s=0.0) as (
            pool,
            messages,
            urls,
        ):
            assert await generate_many(pool, 8) == {"stop": 8}
            assert [m.url for m in messages if isinstance(m, AbortRequest)] == [urls[0]] * 4

    asyncio.run(run())


def test_a_request_expires_after_one_deadline_of_each_engine() -> None:
    async def run() -> None:
        async with pool_of(
            silent, silent, request_timeout_s=0.2, token_timeout_s=0.0, retries=5
        ) as (pool, _, _):
            start = asyncio.get_running_loop().time()
            assert await generate_many(pool, 2) == {"RequestExpired": 2}
            assert asyncio.get_running_loop().time() - start < 2

    asyncio.run(run())


def test_a_request_goes_to_a_silent_engine_only_once() -> None:
    """A second attempt would wait for another deadline."""

    async def run() -> None:
        mute = CountingEngine(silent)
        bad_engine = CountingEngine(failing)
        async with pool_of(
            mute, bad_engine, request_timeout_s=1.5, token_timeout_s=0.0, retries=2
        ) as (
            pool,
            _,
            _,
        ):
            assert await generate_many(pool, 1) == {"RequestFailed": 1}
            assert (mute.calls, bad_engine.calls) == (1, 3)

    asyncio.run(run())


def test_an_engine_has_time_for_each_token_of_the_longest_response() -> None:
    async def run() -> None:
        async with pool_of(silent, request_timeout_s=0.1, token_timeout_s=0.05) as (pool, _, _):
            start = asyncio.get_running_loop().time()
            assert await generate_many(pool, 1) == {"RequestExpired": 1}
            assert 0.6 <= asyncio.get_running_loop().time() - start < 1.6

    asyncio.run(run())
