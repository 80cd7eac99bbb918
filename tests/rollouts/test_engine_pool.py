"""The engine pool: balance, retries, and engines that get no requests after failures."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from megatron_rl.config.schema import EngineSettings
from megatron_rl.contracts.prompt import Sampling
from megatron_rl.rollouts.collector.engines import engine_pool
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool, RequestForm
from megatron_rl.rollouts.wire.messages import (
    AbortRequests,
    EngineLeftOut,
    FromCollector,
    Priority,
)
from sglang_bridge.engine import Engine
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import Generation
from tests.support.fake_engine import (
    LAYERS,
    TOPK,
    Answer,
    Reply,
    answer_each,
    fake_engine,
    hold,
    http_server,
    reply,
)
from tests.support.scripted_model import EOS, PROMPT

SAMPLING = Sampling(max_new_tokens=16, temperature=1.0, stop_token_ids=(EOS,))
FORM = RequestForm(api_key=None, longest_response=1, route_shape=(LAYERS, TOPK), vocab_size=48)


class CountingEngine:
    """Counts the requests that an engine answers."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.calls = 0

    def __call__(self, n: int, body: Reply) -> Reply | bytes | int | None:
        self.calls += 1
        return self.answer(n, body)


def good(n: int, body: Reply) -> Reply:
    return reply(body, "046")


def failing(n: int, body: Reply) -> int:
    return 500


def silent(n: int, body: Reply) -> None:
    return None


async def use(pool: EnginePool, *urls: str) -> None:
    """Let a pool have exactly these engines of its node."""
    await pool.set_engines([Engine(url=url) for url in urls])


@contextlib.asynccontextmanager
async def pool_of(
    *answers: Answer, form: RequestForm = FORM, **settings: Any
) -> AsyncIterator[tuple[EnginePool, list[FromCollector], list[str]]]:
    """Open a pool of engines, and yield it with its reports and the URLs of the engines.

    answers: of each engine.
    """
    messages: list[FromCollector] = []

    async def report(message: FromCollector) -> None:
        messages.append(message)

    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(fake_engine(answer)) for answer in answers]
        pool = EnginePool(EngineSettings(**settings), form, report)
        await use(pool, *urls)
        try:
            yield pool, messages, urls
        finally:
            await pool.close()


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


@pytest.mark.parametrize("end", ["connection", "status", "malformed"])
def test_an_http_request_that_fails_for_many_responses_is_one_failure(end: str) -> None:
    """The only engine answers none of its first requests, and stays in the pool."""
    num_failed = 0

    async def answer(body: Reply) -> Reply:
        return reply(body, "046")

    async def generate(request: web.Request) -> web.StreamResponse:
        nonlocal num_failed
        if num_failed:
            return await answer_each(request, answer)
        await request.read()
        num_failed += 1
        if end == "status":
            return web.Response(status=503)
        if end == "malformed":
            return web.Response(text="data: <html>\n\n")
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def run() -> None:
        messages: list[FromCollector] = []

        async def report(message: FromCollector) -> None:
            messages.append(message)

        async with http_server({"/generate": generate}) as url:
            pool = EnginePool(EngineSettings(), FORM, report)
            await use(pool, url)
            try:
                assert await generate_many(pool, 8) == {"stop": 8}
            finally:
                await pool.close()
        assert messages == [] and num_failed == 1

    asyncio.run(asyncio.wait_for(run(), 30))


def test_an_engine_of_two_ranks_gets_twice_the_requests() -> None:
    small = CountingEngine(good)
    large = CountingEngine(good)

    async def report(message: FromCollector) -> None:
        raise AssertionError(message)

    async def run() -> None:
        async with fake_engine(small) as small_url, fake_engine(large) as large_url:
            engines = [Engine(url=small_url), Engine(url=large_url, tp=2)]
            pool = EnginePool(EngineSettings(), FORM, report)
            await pool.set_engines(engines)
            try:
                assert await generate_many(pool, 30) == {"stop": 30}
            finally:
                await pool.close()

    asyncio.run(run())
    assert (small.calls, large.calls) == (10, 20)


def test_no_rollout_is_lost_while_one_of_two_engines_fails(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The bad engine fails fast, so it always has the fewest requests in flight."""
    bad_engine = CountingEngine(failing)

    async def run() -> None:
        async with pool_of(bad_engine, good, max_running_requests=8) as (
            pool,
            messages,
            urls,
        ):
            assert await generate_many(pool, 128) == {"stop": 128}
            (message,) = messages
            assert (
                isinstance(message, EngineLeftOut)
                and message.url == urls[0]
                and "500" in message.reason
            )
            assert f"{urls[0]} gets no requests after 3 failures in a row" in caplog.text

    asyncio.run(run())
    assert bad_engine.calls <= 32  # some were in flight at its last failure


def test_no_rollout_is_lost_while_one_of_two_engines_is_invalid() -> None:
    async def run() -> None:
        invalid = CountingEngine(lambda n, body: reply(body, "046", output_token_logprobs=[]))
        tokens = Counter[str]()
        async with pool_of(invalid, good, max_running_requests=8) as (pool, messages, _):
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
        async with pool_of(*engines) as (pool, _, _):
            assert await generate_many(pool, 16, tokens) == {"GenerationRejected": 16}
            calls = sum(engine.calls for engine in engines)
            assert 16 <= calls <= 32  # requests of the last engine have no second chance
        assert tokens == {"logprobs_length": 4 * calls}

    asyncio.run(run())


def test_the_only_engine_is_retried_a_limited_number_of_times() -> None:
    async def run() -> None:
        flaky = CountingEngine(lambda n, body: 503 if n < 2 else reply(body, "046"))
        async with pool_of(flaky) as (pool, messages, _):
            assert await generate_many(pool, 1) == {"stop": 1}
            assert messages == []
        dead = CountingEngine(failing)
        async with pool_of(dead) as (pool, _, _):
            assert await generate_many(pool, 1) == {"RequestFailed": 1}
            assert dead.calls == 3

    asyncio.run(run())


def test_a_request_fails_only_after_all_engines_failed() -> None:
    async def run() -> None:
        engines = [CountingEngine(failing) for _ in range(3)]
        async with pool_of(*engines) as (pool, _, _):
            assert await generate_many(pool, 1) == {"RequestFailed": 1}
            assert [engine.calls for engine in engines] == [3, 3, 3]

    asyncio.run(run())


def test_an_invalid_request_is_not_repeated_and_excludes_no_engine() -> None:
    async def run() -> None:
        engines = [CountingEngine(lambda n, body: 400) for _ in range(2)]
        async with pool_of(*engines) as (pool, messages, _):
            assert await generate_many(pool, 8) == {"RequestFailed": 8}
            assert sum(engine.calls for engine in engines) == 8 and messages == []

    asyncio.run(run())


def test_an_engine_that_is_left_out_is_used_again_after_a_set_without_it() -> None:
    works = False

    async def run() -> None:
        nonlocal works
        recovering = CountingEngine(lambda n, body: reply(body, "046") if works else 500)
        async with pool_of(recovering, good, max_running_requests=1) as (pool, messages, urls):
            await generate_many(pool, 16)
            works = True
            calls = recovering.calls
            assert await generate_many(pool, 16) == {"stop": 16}
            assert recovering.calls == calls
            await use(pool, *urls)
            assert await generate_many(pool, 16) == {"stop": 16}
            assert recovering.calls == calls, "a set with it changes nothing"
            await use(pool, urls[1])
            await use(pool, *urls)
            assert await generate_many(pool, 16) == {"stop": 16}
            assert recovering.calls > calls
            assert [type(message) for message in messages] == [EngineLeftOut]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_requests_of_a_silent_engine_go_to_another() -> None:
    async def run() -> None:
        async with pool_of(silent, good, request_timeout_s=1.5) as (
            pool,
            messages,
            urls,
        ):
            assert await generate_many(pool, 8) == {"stop": 8}
            aborts = {(m.url, *m.names) for m in messages if isinstance(m, AbortRequests)}
            assert [url for url, _ in aborts] == [urls[0]] * 4

    asyncio.run(run())


def test_an_engine_that_falls_silent_is_left_out_at_once() -> None:
    """The next request would wait for another deadline."""

    async def run() -> None:
        mute = CountingEngine(silent)
        async with pool_of(mute, good, request_timeout_s=0.2, max_running_requests=1) as (
            pool,
            messages,
            urls,
        ):
            assert await generate_many(pool, 1) == {"stop": 1}
            (left_out,) = (m for m in messages if isinstance(m, EngineLeftOut))
            assert left_out.url == urls[0] and "answered no request" in left_out.reason
            assert await generate_many(pool, 8) == {"stop": 8}
            assert mute.calls == 1

    asyncio.run(run())


def test_the_last_engine_is_left_out_too_and_its_requests_wait_for_another() -> None:
    async def run() -> None:
        mute = CountingEngine(silent)
        async with pool_of(mute, request_timeout_s=0.2) as (
            pool,
            messages,
            urls,
        ):
            requests = asyncio.ensure_future(generate_many(pool, 3))
            await asyncio.sleep(1.0)
            assert not requests.done()
            assert [type(m) for m in messages].count(EngineLeftOut) == 1
            async with fake_engine(good) as url:
                await use(pool, *urls, url)
                assert await asyncio.wait_for(requests, 5) == {"stop": 3}
        assert mute.calls == 3

    asyncio.run(run())


def test_an_engine_has_time_for_each_token_of_the_longest_response() -> None:
    async def run() -> None:
        form = replace(FORM, longest_response=5)
        async with pool_of(silent, good, form=form, request_timeout_s=0.1) as (pool, _, _):
            start = asyncio.get_running_loop().time()
            assert await generate_many(pool, 1) == {"stop": 1}
            assert 0.6 <= asyncio.get_running_loop().time() - start < 30

    asyncio.run(run())


class RecordingEngine:
    """Notes the requests that it gets, by the part of their name that the pool was given."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.bodies: dict[str, Reply] = {}

    def __call__(self, n: int, body: Reply) -> Reply | bytes | int | None:
        name = body["rid"].partition("#")[0]
        self.bodies[name] = {key: value for key, value in body.items() if key != "rid"}
        return self._answer(n, body)


async def generate_with_seeds(pool: EnginePool, count: int) -> list[object]:
    """Run requests at once, each with its own seed."""
    requests = [
        pool.generate(
            PROMPT.token_ids,
            SAMPLING,
            rid=f"r{i}",
            return_routes=True,
            rejected_tokens=Counter(),
            seed=1000 + i,
        )
        for i in range(count)
    ]
    return await asyncio.gather(*requests, return_exceptions=True)


def test_requests_of_a_removed_engine_go_to_another_with_the_same_seed_and_body() -> None:
    async def run() -> None:
        removed_engine = RecordingEngine(silent)
        other = RecordingEngine(good)
        async with pool_of(removed_engine, other) as (pool, messages, urls):
            requests = asyncio.ensure_future(generate_with_seeds(pool, 6))
            while len(removed_engine.bodies) < 3:
                await asyncio.sleep(0.01)
            await use(pool, urls[1])
            generations = await asyncio.wait_for(requests, 5)
        assert not any(isinstance(generation, BaseException) for generation in generations)
        assert len(removed_engine.bodies) == 3 and len(other.bodies) == 6
        for name, body in removed_engine.bodies.items():
            assert other.bodies[name] == body
            assert body["sampling_params"]["sampling_seed"] == 1000 + int(name[1:])
        assert messages == []

    asyncio.run(run())


def test_an_engine_that_answers_while_it_is_removed_is_not_counted_as_failed() -> None:
    async def run() -> None:
        async with pool_of(good, good) as (pool, messages, urls):
            requests = asyncio.ensure_future(generate_many(pool, 8))
            await asyncio.sleep(0)
            await use(pool, urls[1])
            await use(pool, urls[1])
            assert await asyncio.wait_for(requests, 5) == {"stop": 8}
            assert messages == []

    asyncio.run(run())


def test_requests_wait_while_there_is_no_engine_and_go_on_after_one_was_added() -> None:
    async def run() -> None:
        async with pool_of() as (pool, _, _), fake_engine(good) as url:
            requests = asyncio.ensure_future(generate_many(pool, 3))
            await asyncio.sleep(0.3)
            assert not requests.done()
            await use(pool, url)
            assert await asyncio.wait_for(requests, 5) == {"stop": 3}
            await use(pool)
            requests = asyncio.ensure_future(generate_many(pool, 3))
            await asyncio.sleep(0.1)
            assert not requests.done()
            await use(pool, url)
            await use(pool, url)
            assert await asyncio.wait_for(requests, 5) == {"stop": 3}

    asyncio.run(run())


async def wait_for_calls(engine: CountingEngine, count: int) -> None:
    """Wait until an engine has so many requests, and a moment more in which no other may come."""
    deadline = time.monotonic() + 20
    while engine.calls < count:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)
    assert engine.calls == count


def test_the_bound_of_requests_in_flight_follows_the_number_of_engines() -> None:
    async def run() -> None:
        first = CountingEngine(silent)
        second = CountingEngine(silent)
        async with (
            pool_of(first, max_running_requests=3) as (pool, _, urls),
            fake_engine(second) as url,
        ):
            requests = asyncio.ensure_future(generate_many(pool, 20))
            await wait_for_calls(first, 4)
            await use(pool, *urls, url)
            await wait_for_calls(second, 4)
            assert first.calls == 4
            await use(pool, url)
            await wait_for_calls(second, 8)  # the holders of four slots went there
            requests.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await requests

    asyncio.run(run())


def test_a_response_of_another_weight_version_is_the_fault_of_its_engine() -> None:
    """An engine that was started again by itself serves the checkpoint that it has loaded."""

    async def run() -> None:
        stale = CountingEngine(lambda n, body: reply(body, "046", weight_version="2"))
        tokens = Counter[str]()
        async with pool_of(stale, good, max_running_requests=8) as (pool, messages, urls):
            pool.set_version(3)
            assert await generate_many(pool, 64, tokens) == {"stop": 64}
            (message,) = messages
            assert isinstance(message, EngineLeftOut) and message.url == urls[0]
            assert "serves weight version 2 instead of 3" in message.reason
        assert set(tokens) == {"stale"} and tokens.total() == 4 * stale.calls

    asyncio.run(run())


@pytest.mark.parametrize(
    ("version", "reason"),
    [("2", "stale"), ("4", "version_never_sent"), ("default", "version_never_sent")],
)
def test_responses_of_another_weight_version_from_all_engines_end_the_request(
    version: str, reason: str
) -> None:
    async def run() -> None:
        engines = [
            CountingEngine(lambda n, body: reply(body, "046", weight_version=version))
            for _ in range(2)
        ]
        tokens = Counter[str]()
        async with pool_of(*engines) as (pool, _, _):
            pool.set_version(3)
            assert await generate_many(pool, 1, tokens) == {"GenerationRejected": 1}
        assert tokens == {reason: 8}

    asyncio.run(run())


def test_a_request_whose_engines_end_five_times_is_not_sent_to_a_sixth() -> None:
    """The request may be the cause."""

    async def run() -> None:
        engines = [CountingEngine(silent) for _ in range(7)]
        async with pool_of(*engines) as (pool, _, urls):
            requests = asyncio.ensure_future(generate_with_seeds(pool, 1))
            for num_lost in range(5):
                while sum(engine.calls for engine in engines) <= num_lost:
                    await asyncio.sleep(0.01)
                await use(pool, *(url for url, e in zip(urls, engines, strict=True) if not e.calls))
            (error,) = await asyncio.wait_for(requests, 5)
            assert isinstance(error, RequestFailed) and "5 engines ended" in str(error)
            assert sum(engine.calls for engine in engines) == 5

    asyncio.run(run())


def test_a_request_that_four_engines_lost_still_goes_to_a_fifth() -> None:
    async def run() -> None:
        engines = [CountingEngine(silent) for _ in range(4)]
        async with pool_of(*engines, request_timeout_s=0.1) as (
            pool,
            _,
            urls,
        ):
            requests = asyncio.ensure_future(generate_many(pool, 1))
            while sum(engine.calls for engine in engines) < 4:
                await asyncio.sleep(0.01)
            async with fake_engine(good) as url:
                await use(pool, *urls, url)
                assert await asyncio.wait_for(requests, 5) == {"stop": 1}

    asyncio.run(run())


def test_an_engine_whose_connection_ends_loses_no_request() -> None:
    """Whoever started it starts it again. A round of requests without an answer does not count.

    The engine is left out after the third.
    """

    async def run() -> None:
        async with pool_of() as (pool, messages, _):
            dead_url = "http://127.0.0.1:9"
            await use(pool, dead_url)
            requests = asyncio.ensure_future(generate_many(pool, 1))
            while not messages:
                await asyncio.sleep(0.01)
            assert isinstance(messages[0], EngineLeftOut)
            async with fake_engine(good) as url:
                await use(pool, dead_url, url)
                assert await asyncio.wait_for(requests, 5) == {"stop": 1}

    asyncio.run(run())


def test_a_response_that_is_no_longer_wanted_is_not_requested() -> None:
    """Responses also wait for a free slot, or for the end of a hold."""
    engine = CountingEngine(good)

    async def run() -> None:
        async with pool_of(engine) as (pool, _, _):
            await hold(pool)
            wanted_flags = {"r/0": True, "r/1": True}
            requests = {
                rid: asyncio.create_task(
                    pool.generate(
                        PROMPT.token_ids,
                        SAMPLING,
                        rid=rid,
                        return_routes=True,
                        rejected_tokens=Counter(),
                        is_wanted=partial(wanted_flags.__getitem__, rid),
                    )
                )
                for rid in wanted_flags
            }
            await asyncio.sleep(0.05)
            wanted_flags["r/1"] = False
            pool.proceed()
            await asyncio.wait_for(requests["r/0"], 5)
            await asyncio.sleep(0.1)
            assert not requests["r/1"].done()
            requests["r/1"].cancel()
            await asyncio.gather(*requests.values(), return_exceptions=True)

    asyncio.run(run())
    assert engine.calls == 1


@pytest.mark.parametrize(("settings", "seconds"), [({}, 120), ({"urls": ["http://a"]}, 5)])
def test_connections_stay_open_as_long_as_the_kind_of_server_allows(
    settings: dict[str, Any], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run starts a managed server with a longer time than SGLang's default."""
    clients: list[dict[str, Any]] = []
    original = engine_pool.GenerateClient

    def open_client(url: str, **options: Any) -> object:
        clients.append(options)
        return original(url, **options)

    monkeypatch.setattr(engine_pool, "GenerateClient", open_client)

    async def run() -> None:
        async with pool_of(good, **settings):
            pass

    asyncio.run(run())
    assert [client["server_keep_alive_seconds"] for client in clients] == [seconds]


OWN_NODE = 1


@contextlib.asynccontextmanager
async def pool_of_nodes(
    **answers: Answer,
) -> AsyncIterator[tuple[EnginePool, list[str], dict[str, Engine]]]:
    """Open a pool without engines on a node.

    Yields it, the URLs of the engines that it does not use, and the engines by name. answers: of
    each engine, by its name. Those whose name begins with `own` are of the pool's node.
    """
    left_out: list[str] = []

    async def report(message: FromCollector) -> None:
        if isinstance(message, EngineLeftOut):
            left_out.append(message.url)

    async with contextlib.AsyncExitStack() as stack:
        engines = {
            name: Engine(
                url=await stack.enter_async_context(fake_engine(answer)),
                node=OWN_NODE if name.startswith("own") else 0,
            )
            for name, answer in answers.items()
        }
        settings = EngineSettings(max_running_requests=3, request_timeout_s=30.0)
        pool = EnginePool(settings, FORM, report, node=OWN_NODE)
        try:
            yield pool, left_out, engines
        finally:
            await pool.close()


def test_requests_go_to_engines_of_the_own_node_while_there_are_any() -> None:
    own = CountingEngine(good)
    other = CountingEngine(good)

    async def run() -> None:
        async with pool_of_nodes(own=own, other=other) as (pool, _, engines):
            await pool.set_engines([engines["other"], engines["own"]])
            assert await generate_many(pool, 12) == {"stop": 12}
            assert (own.calls, other.calls) == (12, 0)
            await pool.set_engines([engines["other"]])
            assert await generate_many(pool, 12) == {"stop": 12}
            assert (own.calls, other.calls) == (12, 12)
            await pool.set_engines([engines["own"], engines["other"]])
            assert await generate_many(pool, 12) == {"stop": 12}
            assert (own.calls, other.calls) == (24, 12)

    asyncio.run(run())


def test_engines_of_other_nodes_are_used_while_the_own_one_is_left_out() -> None:
    own = CountingEngine(failing)
    other = CountingEngine(good)

    async def run() -> None:
        async with pool_of_nodes(own=own, other=other) as (pool, left_out, engines):
            await pool.set_engines(list(engines.values()))
            assert await generate_many(pool, 12) == {"stop": 12}
            assert left_out == [engines["own"].url]
            own.answer = good
            calls = own.calls
            await pool.set_engines([engines["other"]])
            await pool.set_engines(list(engines.values()))
            assert await generate_many(pool, 12) == {"stop": 12}
            assert (own.calls, other.calls) == (calls + 12, 12)

    asyncio.run(run())


def test_a_request_on_another_node_ends_there_when_an_own_engine_comes_back() -> None:
    own = CountingEngine(good)

    async def run() -> None:
        async with (
            pool_of_nodes(own=own) as (pool, _, engines),
            fake_engine(good, seconds=0.5) as url,
        ):
            engines["other"] = Engine(url=url, node=0)
            await pool.set_engines([engines["other"]])
            request = asyncio.ensure_future(generate_many(pool, 1))
            await asyncio.sleep(0.1)
            await pool.set_engines(list(engines.values()))
            assert await generate_many(pool, 1) == {"stop": 1}
            assert own.calls == 1 and not request.done()
            assert await request == {"stop": 1}
            assert own.calls == 1

    asyncio.run(run())


def test_requests_in_flight_are_bounded_by_the_engines_that_may_be_used() -> None:
    own = CountingEngine(silent)
    others = [CountingEngine(silent), CountingEngine(silent)]

    async def run() -> None:
        async with pool_of_nodes(own=own, other_1=others[0], other_2=others[1]) as (
            pool,
            _,
            engines,
        ):
            await pool.set_engines(list(engines.values()))
            requests = asyncio.ensure_future(generate_many(pool, 20))
            await wait_for_calls(own, 4)
            assert [engine.calls for engine in others] == [0, 0]
            await pool.set_engines([engines["other_1"], engines["other_2"]])
            for engine in others:
                await wait_for_calls(engine, 4)
            requests.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await requests

    asyncio.run(run())


def test_idle_time_is_that_of_own_engines() -> None:
    async def run() -> None:
        async with pool_of_nodes(own=good, other=good) as (pool, _, engines):
            await pool.set_engines([engines["other"]])
            await asyncio.sleep(0.1)
            assert pool.idle_seconds == 0
            await pool.set_engines(list(engines.values()))
            await asyncio.sleep(0.1)
            assert pool.idle_seconds >= 0.1

    asyncio.run(run())


def test_an_entry_that_changes_is_another_engine() -> None:
    """Its requests begin again: the server behind the URL is another one."""
    engine = CountingEngine(silent)

    async def run() -> None:
        async with pool_of(engine) as (pool, _, urls):
            requests = asyncio.ensure_future(generate_many(pool, 2))
            await wait_for_calls(engine, 2)
            await use(pool, *urls)
            await asyncio.sleep(0.1)
            assert engine.calls == 2
            engine.answer = good
            await pool.set_engines([Engine(url=urls[0], tp=2)])
            assert await asyncio.wait_for(requests, 5) == {"stop": 2}

    asyncio.run(run())


def start_with(pool: EnginePool, **places: Priority) -> list[asyncio.Task[Generation]]:
    """Request responses with these names and priorities."""
    return [
        asyncio.create_task(
            pool.generate(
                PROMPT.token_ids,
                SAMPLING,
                rid=name,
                return_routes=False,
                rejected_tokens=Counter(),
                priority=place,
            )
        )
        for name, place in places.items()
    ]


def name_of(body: Reply) -> str:
    """Return the name under which a test has requested a response: the client appends a number."""
    name: str = body["rid"].partition("#")[0]
    return name


def test_responses_that_wait_for_an_engine_go_by_their_priority() -> None:
    names: list[str] = []

    def answer(n: int, body: Reply) -> Reply:
        names.append(name_of(body))
        return reply(body, "046")

    async def run() -> None:
        async with pool_of(answer, max_running_requests=1) as (pool, _, urls):
            await pool.set_engines([])
            tasks = start_with(pool, last=(2, -9), short=(1, -1), long=(1, -9), first=(0, 0))
            await asyncio.sleep(0.02)
            await use(pool, *urls)
            await asyncio.gather(*tasks)

    asyncio.run(run())
    # Two have slots from the beginning
    assert (sorted(names[:2]), names[2:]) == (["first", "long"], ["short", "last"])


def test_a_response_in_pieces_keeps_its_slot() -> None:
    """Also while responses wait that would go first."""
    names: list[str] = []
    release = asyncio.Event()

    async def late(body: Reply) -> Reply:
        await release.wait()
        return reply(body, "046")

    def answer(n: int, body: Reply) -> Awaitable[Reply] | Reply:
        names.append(name_of(body))
        if name_of(body) == "blocked":
            return late(body)
        whole = reply(body, "046")
        if name_of(body) == "short" or names.count("pieces") == 3:
            return whole
        first_token = whole["output_ids"][0]
        whole["meta_info"]["finish_reason"] = {"type": "abort"}
        whole["meta_info"]["output_token_logprobs"] = [(-0.5, first_token, None)]
        return whole | {"output_ids": [first_token]}

    async def run() -> None:
        async with pool_of(answer, max_running_requests=1) as (pool, _, _):
            tasks = start_with(pool, pieces=(2, 0))
            await asyncio.sleep(0)
            tasks += start_with(pool, blocked=(1, -9), short=(1, -1))
            generation = await tasks[0]
            assert len(generation.output_ids) == 6
            release.set()
            await asyncio.gather(*tasks)

    asyncio.run(run())
    assert [name for name in names if name != "blocked"] == [*["pieces"] * 3, "short"]
