"""Measures what replies with routes cost a collector, up to the checked and encoded rollout.

    python reply_cost.py DTYPE TOKENS REPLIES ROUNDS

A server in another process sends REPLIES replies of TOKENS tokens at the same time, of 94 layers
with 8 of 128 experts each. DTYPE: uint8, as the plugin sends experts, or int32. Prints JSON:

bytes: of a reply. cpu, loop: milliseconds of processor time for a reply, in the process and in its
event loop. longest: milliseconds in which the event loop looked at no event. memory: bytes by which
the process grew. inline_loop, inline_longest: the same without threads beside the event loop.

Each value is the smallest of several rounds, because other programs disturb, and the first round
also opens the connections. `memory` is the growth in the first round.
"""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web

from megatron_rl.contracts.prompt import Prompt, Sampling
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.environments.episode import Episode, EpisodeRules
from megatron_rl.models.tokenizer import Tokenizer
from megatron_rl.rollouts.wire.codec import encode
from sglang_bridge.client import GenerateClient
from sglang_bridge.plugin.narrow_routes import narrow

LAYERS = 94
TOPK = 8
EXPERTS = 128
SHAPE = RouteShape(
    moe_layers=tuple(range(LAYERS)), num_hidden_layers=LAYERS, num_experts=EXPERTS, topk=TOPK
)
ASSETS = Path(__file__).parents[2] / "megatron_rl/models/assets"
TOKENIZER = Tokenizer.from_directory(str(ASSETS / "qwen3_moe_tiny_two_digit_addition"))
PROMPT = Prompt(id="p", token_ids=(1,), answer="", task="t")


def reply_body(dtype: str, tokens: int) -> bytes:
    """A reply to a prompt of one token, so that every output token but the last is an input."""
    first = np.random.default_rng(0).integers(0, EXPERTS, (tokens, LAYERS, 1))
    routes = ((first + np.arange(TOPK)) % EXPERTS).astype(np.int32)
    sent = narrow(routes) if dtype == "uint8" else routes
    meta = {
        "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "0",
        "output_token_logprobs": [[-0.5123456, 7, None]] * tokens,
        "routed_experts": base64.b64encode(sent.tobytes()).decode(),
    }
    return json.dumps({"output_ids": [7] * tokens, "meta_info": meta}).encode()


def serve(listener: socket.socket, size: Connection, dtype: str, tokens: int) -> None:
    """Answer every request with the same body. Send its size."""
    body = reply_body(dtype, tokens)
    size.send(len(body))

    async def generate(request: web.Request) -> web.StreamResponse:
        names = (await request.json())["rid"]
        if isinstance(names, str):
            return web.Response(body=body)
        response = web.StreamResponse()
        await response.prepare(request)
        for index in range(len(names)):
            await response.write(b"data: ")
            await response.write(body[:-1])
            await response.write(f',"index":{index}}}\n\n'.encode())
        return response

    application = web.Application()
    application.router.add_post("/generate", generate)
    web.run_app(application, sock=listener, print=None)


class TimedSelector(selectors.DefaultSelector):
    """Notes for how long the event loop worked each time between two looks at its events."""

    def __init__(self) -> None:
        super().__init__()
        self.longest = 0.0
        self._start = time.perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.longest = max(self.longest, time.perf_counter() - self._start)
        events = super().select(timeout)
        self._start = time.perf_counter()
        return events


class InlineExecutor(Executor):
    """Runs everything in the thread that submits it."""

    def submit(
        self, function: Callable[..., Any], /, *arguments: Any, **options: Any
    ) -> Future[Any]:
        future = Future[Any]()
        future.set_result(function(*arguments, **options))
        return future


async def receive_rollouts(
    client: GenerateClient, tokens: int, replies: int, threads: Executor
) -> None:
    """Sample, check and encode rollouts as a collector does."""
    sampling = Sampling(max_new_tokens=tokens, temperature=1.0)
    rules = EpisodeRules(sampling=sampling, routes=SHAPE, train_truncated=True)
    loop = asyncio.get_running_loop()

    async def receive(index: int) -> None:
        generate = partial(client.generate, rid=str(index))
        episode = Episode(PROMPT, generate, TOKENIZER, rules, rollout_id="r", threads=threads)
        await episode.respond()
        await loop.run_in_executor(threads, encode, episode.rollout())

    await asyncio.gather(*map(receive, range(replies)))


async def measure_round(
    client: GenerateClient, tokens: int, replies: int, threads: Executor, selector: TimedSelector
) -> dict[str, float]:
    """Return milliseconds of a reply, and the largest memory of the process so far in bytes."""
    selector.longest = 0.0
    cpu = time.process_time()
    loop = time.thread_time()
    await receive_rollouts(client, tokens, replies, threads)
    loop = time.thread_time() - loop
    cpu = time.process_time() - cpu
    return {
        "cpu": cpu / replies * 1e3,
        "loop": loop / replies * 1e3,
        "longest": selector.longest * 1e3,
        "memory": largest_memory(),
    }


def measure(
    url: str, tokens: int, replies: int, rounds: int, threads: Executor
) -> dict[str, float]:
    """Return the smallest values of several rounds. `memory` is the growth in the first one."""
    selector = TimedSelector()

    async def run() -> list[dict[str, float]]:
        async with GenerateClient(url, route_shape=(LAYERS, TOPK), threads=threads) as client:
            return [
                await measure_round(client, tokens, replies, threads, selector)
                for _ in range(rounds)
            ]

    before = largest_memory()
    with (
        threads,
        asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner,
    ):
        costs = runner.run(run())
    smallest = {name: min(cost[name] for cost in costs) for name in costs[0]}
    return {**smallest, "memory": smallest["memory"] - before}


def largest_memory() -> int:
    """Return the largest memory of the process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(dtype: str, tokens: int, replies: int, rounds: int) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(listener, there, dtype, tokens)
    )
    server.start()
    try:
        num_bytes = here.recv()
        costs = measure(url, tokens, replies, rounds, ThreadPoolExecutor(2))
        inline = measure(url, tokens, replies, rounds, InlineExecutor())
    finally:
        server.terminate()
        server.join(10)
    inline_costs = {f"inline_{name}": inline[name] for name in ("loop", "longest")}
    return {"bytes": num_bytes, **costs, **inline_costs}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], *map(int, sys.argv[2:]))))
