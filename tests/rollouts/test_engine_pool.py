"""The engines of a node behind one `generate`: who is asked, who is asked next, and who is left
out.
"""

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


class Counted:
    """An engine's answers, counted."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls = 0

    def __call__(self, n: int, asked: Reply) -> Reply | int | None:
        self.calls += 1
        return self.answer(n, asked)


def good(n: int, asked: Reply) -> Reply:
    return reply(asked, "046")


def failing(n: int, asked: Reply) -> int:
    return 500


def silent(n: int, asked: Reply) -> None:
    return None


@contextlib.asynccontextmanager
async def pool_of(
    *answers: Answer, **settings: object
) -> AsyncIterator[tuple[EnginePool, list[FromCollector], list[str]]]:
    """A pool of engines that answer so, what it told, and their URLs."""
    told: list[FromCollector] = []

    async def tell(message: FromCollector) -> None:
        told.append(message)

    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(fake_engine(answer)) for answer in answers]
        pool = EnginePool([Engine(url=url) for url in urls], EngineSettings(**settings), FORM, tell)  # type: ignore[arg-type]
        try:
            yield pool, told, urls
        finally:
            await pool.close()


@pytest.fixture(autouse=True)
def quick_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines here do not abort: nobody waits for it."""
    monkeypatch.setattr("sglang_bridge.client._ABORT_SECONDS", 0.05)


async def draw(pool: EnginePool, count: int) -> Counter[str]:
    """What became of so many requests at once: finish reasons, and names of errors."""
    requests = [
        pool.generate(PROMPT.token_ids, SAMPLING, rid=f"r{i}", return_routes=True)
        for i in range(count)
    ]
    results = await asyncio.gather(*requests, return_exceptions=True)
    return Counter(
        type(r).__name__ if isinstance(r, BaseException) else r.finish_reason for r in results
    )


def test_requests_in_flight_are_bounded() -> None:
    flying, most = 0, 0

    async def run() -> None:
        nonlocal flying, most
        async with pool_of(good, max_running_requests=2) as (pool, _, _):
            client = pool._members[0].client
            original = client.generate

            async def counted(*args: object, **kwargs: object) -> object:
                nonlocal flying, most
                flying += 1
                most = max(most, flying)
                try:
                    return await original(*args, **kwargs)  # type: ignore[arg-type]
                finally:
                    flying -= 1

            client.generate = counted  # type: ignore[method-assign, assignment]
            assert await draw(pool, 10) == {"stop": 10}

    asyncio.run(run())
    assert most == 4  # two for each that runs


@pytest.mark.parametrize("retries", [0, 2])
def test_no_sample_is_lost_while_one_of_two_engines_fails(
    retries: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails faster than the other works, so it always has the fewest requests in flight."""
    bad = Counted(failing)

    async def run() -> None:
        async with pool_of(bad, good, retries=retries, max_running_requests=8) as (
            pool,
            told,
            urls,
        ):
            pool._members[0].pause = 60.0  # however long this takes, it does not come back
            assert await draw(pool, 128) == {"stop": 128}
            (message,) = told
            assert (
                isinstance(message, EngineLeftOut)
                and message.url == urls[0]
                and "500" in message.reason
            )
            assert f"{urls[0]} is left out after 3 failures in a row" in caplog.text

    asyncio.run(run())
    assert bad.calls <= 32  # those that were on their way when it was left out


def test_no_sample_is_lost_while_one_of_two_engines_answers_junk() -> None:
    async def run() -> None:
        junk = Counted(lambda n, asked: reply(asked, "046", output_token_logprobs=[]))
        async with pool_of(junk, good, max_running_requests=8) as (pool, told, _):
            pool._members[0].pause = 60.0
            assert await draw(pool, 128) == {"stop": 128}
            assert [type(m) for m in told] == [EngineLeftOut] and junk.calls <= 32

    asyncio.run(run())


def test_junk_from_every_engine_is_drawn_twice_at_most() -> None:
    """NaN weights: whole responses would be drawn again and again for nothing."""

    async def run() -> None:
        engines = [
            Counted(lambda n, asked: reply(asked, "046", output_token_logprobs=[]))
            for _ in range(4)
        ]
        async with pool_of(*engines, retries=5) as (pool, _, _):
            assert await draw(pool, 16) == {"GenerationRejected": 16}
            assert sum(engine.calls for engine in engines) == 32

    asyncio.run(run())


def test_failures_are_retried_on_the_only_engine_a_bounded_number_of_times() -> None:
    async def run() -> None:
        flaky = Counted(lambda n, asked: 503 if n < 2 else reply(asked, "046"))
        async with pool_of(flaky, retries=2) as (pool, told, _):
            assert await draw(pool, 1) == {"stop": 1}
            assert told == []  # the last engine is never left out
        dead = Counted(failing)
        async with pool_of(dead, retries=3) as (pool, told, _):
            assert await draw(pool, 1) == {"RequestFailed": 1}
            assert dead.calls == 4 and told == []

    asyncio.run(run())


def test_all_engines_are_asked_before_a_request_failed() -> None:
    async def run() -> None:
        engines = [Counted(failing) for _ in range(3)]
        async with pool_of(*engines, retries=1) as (pool, _, _):
            assert await draw(pool, 1) == {"RequestFailed": 1}
            assert [engine.calls for engine in engines] == [2, 2, 2]

    asyncio.run(run())


def test_a_request_that_is_itself_at_fault_is_asked_once_and_blames_no_engine() -> None:
    async def run() -> None:
        engines = [Counted(lambda n, asked: 400) for _ in range(2)]
        async with pool_of(*engines, retries=5) as (pool, told, _):
            assert await draw(pool, 8) == {"RequestFailed": 8}
            assert sum(engine.calls for engine in engines) == 8 and told == []

    asyncio.run(run())


def test_an_engine_that_was_left_out_is_used_again_once_it_is_healthy() -> None:
    works = healthy = False

    async def run() -> None:
        nonlocal works, healthy
        recovering = Counted(lambda n, asked: reply(asked, "046") if works else 500)
        told: list[FromCollector] = []

        async def tell(message: FromCollector) -> None:
            told.append(message)

        async with (
            fake_engine(recovering, healthy=lambda: healthy) as sick,
            fake_engine(good) as sound,
        ):
            pool = EnginePool(
                [Engine(url=sick), Engine(url=sound)],
                EngineSettings(max_running_requests=1),
                FORM,
                tell,
            )
            pool._members[0].pause = 0.1
            await draw(pool, 16)
            calls = recovering.calls
            await asyncio.sleep(0.5)
            assert (
                await draw(pool, 16) == {"stop": 16} and recovering.calls == calls
            )  # not healthy: not asked
            works = healthy = True
            while not isinstance(told[-1], EngineBack):
                await asyncio.sleep(0.05)
            assert await draw(pool, 16) == {"stop": 16} and recovering.calls > calls
            assert [type(m) for m in told] == [EngineLeftOut, EngineBack]
            await pool.close()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_requests_of_a_silent_engine_go_to_another() -> None:
    async def run() -> None:
        async with pool_of(silent, good, request_timeout_s=1.5, token_timeout_s=0.0) as (
            pool,
            told,
            urls,
        ):
            assert await draw(pool, 8) == {"stop": 8}
            assert [m.url for m in told if isinstance(m, AbortRequest)] == [urls[0]] * 4

    asyncio.run(run())


def test_a_request_that_no_engine_answers_expired_after_one_deadline_each() -> None:
    async def run() -> None:
        async with pool_of(
            silent, silent, request_timeout_s=0.2, token_timeout_s=0.0, retries=5
        ) as (pool, _, _):
            start = asyncio.get_running_loop().time()
            assert await draw(pool, 2) == {"RequestExpired": 2}
            assert asyncio.get_running_loop().time() - start < 2

    asyncio.run(run())


def test_a_silent_engine_is_asked_once_for_each_request() -> None:
    """Another deadline of waiting for the same engine helps nobody; one that fails at once may be
    asked again.
    """

    async def run() -> None:
        mute, bad = Counted(silent), Counted(failing)
        async with pool_of(mute, bad, request_timeout_s=1.5, token_timeout_s=0.0, retries=2) as (
            pool,
            _,
            _,
        ):
            assert await draw(pool, 1) == {"RequestFailed": 1}
            assert (mute.calls, bad.calls) == (1, 3)

    asyncio.run(run())


def test_an_engine_has_time_for_each_token_of_the_longest_response() -> None:
    async def run() -> None:
        async with pool_of(silent, request_timeout_s=0.1, token_timeout_s=0.05) as (pool, _, _):
            start = asyncio.get_running_loop().time()
            assert await draw(pool, 1) == {"RequestExpired": 1}
            assert 0.6 <= asyncio.get_running_loop().time() - start < 1.6

    asyncio.run(run())
