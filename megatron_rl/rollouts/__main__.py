"""`python -m megatron_rl.rollouts HOST PORT NODE`: the collector process. The run's key is in its
environment.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys

from megatron_rl.rollouts.collector import serve
from megatron_rl.rollouts.link import Link, LinkLost

RUN_KEY_VARIABLE = "MEGATRON_RL_RUN_KEY"


async def _main(host: str, port: int, node: int, run_key: str) -> None:
    link = Link(host, port, node, run_key)
    try:
        await serve(link, node)
    except LinkLost as error:
        sys.exit(f"{error}; the collector ends")
    finally:
        link.close()


def _allow_many_connections() -> None:
    """One request is one connection: take as many file descriptors as this user may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    _allow_many_connections()
    asyncio.run(
        _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), os.environ.pop(RUN_KEY_VARIABLE))
    )
