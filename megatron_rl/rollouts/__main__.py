"""`python -m megatron_rl.rollouts HOST PORT NODE`: the collector process."""

from __future__ import annotations

import asyncio
import os
import resource
import sys

from megatron_rl.rollouts.collector import serve
from megatron_rl.rollouts.messages import Hello, frame

RUN_KEY_VARIABLE = "MEGATRON_RL_RUN_KEY"


async def _main(host: str, port: int, node: int, key: str) -> None:
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(frame(Hello(key=key, node=node)))
    await writer.drain()
    await serve(reader, writer, node)


def _allow_many_connections() -> None:
    """One request is one connection: take as many file descriptors as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    _allow_many_connections()
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), os.environ[RUN_KEY_VARIABLE]))
