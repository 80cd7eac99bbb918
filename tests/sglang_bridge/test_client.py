"""The generating client against a small HTTP server that answers as scripted."""

import asyncio
import base64
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from aiohttp import web

from sglang_bridge.client import GenerateClient
from sglang_bridge.errors import RequestFailed
from sglang_bridge.generation import GenerationRejected

SAMPLING = SimpleNamespace(max_new_tokens=4, temperature=0.7, stop_token_ids=(2,))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def good_reply() -> web.Response:
    routes = base64.b64encode(np.zeros((3, 1, 1), "<i4").tobytes()).decode()
    meta = {
        "finish_reason": {"type": "length"},
        "weight_version": "1",
        "output_token_logprobs": [[-1.0, 5, None]],
        "routed_experts": routes,
    }
    return web.json_response({"output_ids": [5], "meta_info": meta})


@asynccontextmanager
async def serving(generate: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/generate", generate)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def test_a_request_asks_for_the_untruncated_distribution() -> None:
    seen: list[tuple[dict, str]] = []

    async def generate(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.headers["Authorization"]))
        return good_reply()

    async def scenario() -> None:
        async with serving(generate) as url, GenerateClient(url, api_key="k", route_shape=(1, 1)) as client:
            generation = await client.generate([1, 2, 3], SAMPLING, rid="a")
            assert generation.output_ids.tolist() == [5]
            assert generation.routes is not None and generation.routes.shape == (3, 1, 1)

    asyncio.run(scenario())
    body, key = seen[0]
    assert key == "Bearer k"
    assert body["input_ids"] == [1, 2, 3]
    sampling = body["sampling_params"]
    assert (sampling["top_p"], sampling["top_k"], sampling["temperature"]) == (1.0, -1, 0.7)
    assert sampling["stop_token_ids"] == [2]
    assert "n" not in sampling  # one sample per request
    assert body["return_logprob"] and body["return_routed_experts"]


def test_busy_answers_and_lost_connections_are_tried_again_under_other_names() -> None:
    names: list[str] = []

    async def generate(request: web.Request) -> web.StreamResponse:
        names.append((await request.json())["rid"])
        if len(names) == 1:
            return web.Response(status=503)
        if len(names) == 2:
            assert request.transport is not None
            request.transport.close()
        return good_reply()

    async def scenario() -> None:
        async with serving(generate) as url, GenerateClient(url, retries=2, route_shape=(1, 1)) as client:
            await client.generate([1, 2, 3], SAMPLING, rid="a")

    asyncio.run(scenario())
    assert len(set(names)) == 3


def test_retries_are_bounded() -> None:
    calls = itertools.count()

    async def generate(request: web.Request) -> web.Response:
        next(calls)
        return web.Response(status=500, text="out of order")

    async def scenario() -> None:
        async with serving(generate) as url, GenerateClient(url, retries=1) as client:
            with pytest.raises(RequestFailed, match="500: out of order"):
                await client.generate([1], SAMPLING, rid="a", return_routes=False)

    asyncio.run(scenario())
    assert next(calls) == 2


def test_a_refusal_is_not_tried_again() -> None:
    calls = itertools.count()

    async def generate(request: web.Request) -> web.Response:
        next(calls)
        return web.Response(status=400, text="prompt too long")

    async def scenario() -> None:
        async with serving(generate) as url, GenerateClient(url, retries=5) as client:
            with pytest.raises(RequestFailed, match="prompt too long") as caught:
                await client.generate([1], SAMPLING, rid="a", return_routes=False)
            assert caught.value.status == 400

    asyncio.run(scenario())
    assert next(calls) == 1


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_what_is_given_up_closes_its_connection(how: str) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def generate(request: web.Request) -> web.Response:
        asked.set()
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.01)
        closed.set()
        return good_reply()

    async def scenario() -> None:
        deadline = 0.3 if how == "deadline" else 60.0
        async with serving(generate) as url, GenerateClient(url, deadline_seconds=deadline) as client:
            task = asyncio.create_task(client.generate([1], SAMPLING, rid="a", return_routes=False))
            if how == "deadline":
                with pytest.raises(RequestFailed, match="within 0 s"):
                    await task
            else:
                await asked.wait()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            await asyncio.wait_for(closed.wait(), 5)

    asyncio.run(scenario())


def test_nobody_listening_fails_within_the_retries() -> None:
    async def scenario() -> None:
        async with GenerateClient("http://127.0.0.1:9", retries=1) as client:
            with pytest.raises(RequestFailed, match="lost its connection"):
                await client.generate([1], SAMPLING, rid="a", return_routes=False)

    asyncio.run(scenario())


def test_a_bad_reply_is_rejected_and_routes_need_a_shape() -> None:
    async def generate(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    async def scenario() -> None:
        async with serving(generate) as url, GenerateClient(url) as client:
            with pytest.raises(GenerationRejected, match="malformed"):
                await client.generate([1], SAMPLING, rid="a", return_routes=False)
            with pytest.raises(ValueError, match="route_shape"):
                await client.generate([1], SAMPLING, rid="a")

    asyncio.run(scenario())
