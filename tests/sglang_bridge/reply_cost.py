"""Measures what replies with routes cost their client.

    python reply_cost.py DTYPE TOKENS REPLIES

A server in another process sends REPLIES replies of TOKENS tokens at the same time, of 94 layers
with 8 of 128 experts each, whose experts have DTYPE. Prints JSON: bytes of a reply, CPU
milliseconds of a reply in the process and in its event loop, and the bytes by which the memory of
the process grew.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import multiprocessing
import resource
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from megatron_rl.contracts.prompt import Prompt
from megatron_rl.contracts.routes import RouteShape
from megatron_rl.environments.rollout_builder import RolloutBuilder
from megatron_rl.rollouts.wire.codec import encode
from sglang_bridge.client import GenerateClient
from sglang_bridge.request import Sampling

LAYERS = 94
TOPK = 8
EXPERTS = 128
SHAPE = RouteShape(
    moe_layers=tuple(range(LAYERS)), num_hidden_layers=LAYERS, num_experts=EXPERTS, topk=TOPK
)
PROMPT = Prompt(id="p", token_ids=(1,), answer="", task="t")


def reply_body(dtype: str, tokens: int) -> bytes:
    """A reply to a prompt of one token, so that every output token but the last is an input."""
    first = np.random.default_rng(0).integers(0, EXPERTS, (tokens, LAYERS, 1))
    routes = ((first + np.arange(TOPK)) % EXPERTS).astype(dtype)
    meta = {
        "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "0",
        "output_token_logprobs": [[-0.5123456, 7, None]] * tokens,
        "routed_experts": base64.b64encode(routes.tobytes()).decode(),
    }
    return json.dumps({"output_ids": [7] * tokens, "meta_info": meta}).encode()


def serve(listener: socket.socket, size: Connection, dtype: str, tokens: int) -> None:
    """Answer every request of every connection with the same body. Send its size."""
    body = reply_body(dtype, tokens)
    size.send(len(body))
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):  # the client closed the connection
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readuntil(b"}")  # of its sampling parameters
                await reader.readuntil(b"}")
                writer.writelines((head, body))
                await writer.drain()

    async def run() -> None:
        server = await asyncio.start_server(answer, sock=listener)
        await server.serve_forever()

    asyncio.run(run())


async def measure(url: str, tokens: int, replies: int) -> dict[str, float]:
    sampling = Sampling(max_new_tokens=tokens, temperature=1.0)
    with ThreadPoolExecutor(2) as threads:
        async with GenerateClient(url, route_shape=(LAYERS, TOPK), threads=threads) as client:

            async def receive(index: int) -> int:
                generation = await client.generate([1], sampling, rid=str(index))
                builder = RolloutBuilder(str(index), PROMPT, 0, SHAPE)
                builder.sample(generation)
                rollout = builder.rollout(generation.finish_reason, trainable=True)
                return len(encode(rollout))

            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            cpu_before = time.process_time()
            loop_before = time.thread_time()
            await asyncio.gather(*map(receive, range(replies)))
            cpu = time.process_time() - cpu_before
            loop = time.thread_time() - loop_before
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"cpu": cpu / replies * 1e3, "loop": loop / replies * 1e3, "memory": peak * 1024}


def main(dtype: str, tokens: int, replies: int) -> dict[str, Any]:
    here, there = multiprocessing.Pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server = multiprocessing.get_context("spawn").Process(
        target=serve, args=(listener, there, dtype, tokens)
    )
    server.start()
    try:
        return {"bytes": here.recv(), **asyncio.run(measure(url, tokens, replies))}
    finally:
        server.terminate()
        server.join(10)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
