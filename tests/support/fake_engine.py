"""A small HTTP server that answers as an engine does: its bytes, not its model."""

import asyncio
import base64
import contextlib
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np
from aiohttp import web

from megatron_rl.config.schema import (
    EngineSettings,
    EnvironmentSettings,
    RewardSettings,
    RolloutSettings,
)
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.rollouts.collector.engines.engine_pool import EnginePool
from megatron_rl.rollouts.wire.messages import Configure, Serve
from sglang_bridge.engine import Engine
from tests.support.scripted_model import CHECKPOINT, EOS, TOKENIZER

LAYERS = 4
TOPK = 2

Reply = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = Callable[[int, Reply], Awaitable[Reply] | Reply | bytes | int | None]


def reply(request: Reply, text: str, **changes: object) -> Reply:
    """A text and its end of sequence in answer to a request, with routes if it asked for them."""
    ids = [*TOKENIZER.encode(text), EOS]
    meta: Reply = {
        "finish_reason": {"type": "stop"},
        "weight_version": "3",
        "output_token_logprobs": [(-0.5, token, None) for token in ids],
    }
    if request["return_routed_experts"]:
        meta["routed_experts"] = routes(request, len(ids))
    return {"output_ids": ids, "meta_info": meta | changes}


def routes(request: Reply, num_output: int, experts: tuple[int, int] = (0, 1)) -> str:
    """Rows for a request's inputs from the first one that it wants, as the engine encodes them."""
    num_rows = len(request["input_ids"]) + num_output - 1
    num_rows -= request.get("routed_experts_start_len", 0)
    rows = np.tile(np.array(experts, np.int32), (num_rows, LAYERS, 1))
    return base64.b64encode(rows.tobytes()).decode()


def short_name(name: str) -> str:
    """Return the name of a request, or a text with one, without the random part of its client."""
    return re.sub(r"#[0-9a-f]{16}\.", "#", name)


async def answer_each(
    request: web.Request, answer: Callable[[Reply], Awaitable[Reply | bytes | int]]
) -> web.StreamResponse:
    """Answer a `/generate` request as SGLang does, also one for several responses.

    Its replies come in a stream, each after its first token, in the order in which they end. A
    status in place of a reply is the scheduler's refusal of one of them.
    """
    body = json.loads(await request.read())
    if isinstance(body["rid"], str):
        result = await answer(body)
        if isinstance(result, bytes):
            return web.Response(body=result)
        if isinstance(result, int):
            return web.Response(status=result)
        return web.json_response(result)

    async def answer_one(index: int) -> tuple[int, Reply | bytes | int]:
        keys = ("rid", "input_ids", "sampling_params")
        return index, await answer(body | {key: body[key][index] for key in keys})

    response = web.StreamResponse()
    await response.prepare(request)
    tasks = [asyncio.create_task(answer_one(index)) for index in range(len(body["rid"]))]
    try:
        for task in asyncio.as_completed(tasks):
            index, result = await task
            for event in _events(result, index):
                await response.write(b"data: " + event + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    finally:
        for running in tasks:
            running.cancel()
    return response


def _events(result: Reply | bytes | int, index: int) -> list[bytes]:
    if isinstance(result, bytes):
        return [result]
    if isinstance(result, int):
        reason = {"type": "abort", "status_code": result, "message": "refused"}
        meta = {"finish_reason": reason, "weight_version": "3"}
        return [json.dumps({"output_ids": [], "meta_info": meta, "index": index}).encode()]
    first = {"output_ids": result["output_ids"][:1], "meta_info": {"finish_reason": None}}
    replies = [first | {"index": index}, result | {"index": index}]
    return [json.dumps(reply, separators=(",", ":")).encode() for reply in replies]


@contextlib.asynccontextmanager
async def http_server(handlers: Mapping[str, Handler]) -> AsyncIterator[str]:
    """Serve handlers by their paths, and yield the URL."""
    application = web.Application(client_max_size=2**30)
    for path, handler in handlers.items():
        application.router.add_route("*", path, handler)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def fake_engine(
    answer: Answer, *, healthy: Callable[[], bool] = lambda: True, seconds: float = 0.01
) -> AsyncIterator[str]:
    """Serve `/generate` and `/health` and yield the URL.

    Request number n gets `answer(n, request)`: a reply or its bytes, one to wait for, a status, or
    with None no answer. seconds: what each takes.
    """
    count = 0

    async def answer_one(request: Reply) -> Reply | bytes | int:
        nonlocal count
        count += 1
        result = answer(count - 1, request)
        if isinstance(result, Awaitable):
            result = await result
        await asyncio.sleep(3600.0 if result is None else seconds)
        assert result is not None
        return result

    async def generate(request: web.Request) -> web.StreamResponse:
        return await answer_each(request, answer_one)

    async def health(request: web.Request) -> web.Response:
        return web.Response(status=200 if healthy() else 503)

    async with http_server({"/generate": generate, "/health": health}) as url:
        yield url


async def hold(pool: EnginePool) -> None:
    """Pause a pool, and wait until no engine works on a request."""
    pool.pause()
    await pool.rest()


def serving(*urls: str, version: int | None = None, is_paused: bool = False) -> Serve:
    """The state of a collector with engines at these addresses."""
    engines = tuple(Engine(url=url) for url in urls)
    return Serve(number=1, engines=engines, version=version, is_paused=is_paused)


def configuration(environment: EnvironmentSettings | None = None) -> Configure:
    """A collector's configuration."""
    return Configure(
        api_key="secret",
        model_path=str(CHECKPOINT),
        routes=RouteShape(
            moe_layers=(0, 1, 2, 3), num_hidden_layers=LAYERS, num_experts=8, topk=TOPK
        ),
        engine=EngineSettings(request_timeout_s=5.0, max_running_requests=3),
        rollout=RolloutSettings(max_new_tokens=16),
        reward=RewardSettings(timeout_s=5.0),
        environment=environment or EnvironmentSettings(),
        vocab_size=48,
    )
