"""Collector process: `python -m megatron_rl.rollouts HOST PORT NODE`.

The environment variable MEGATRON_RL_RUN_KEY holds the run's key.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys

from megatron_rl.rollouts.collector import serve
from megatron_rl.rollouts.link import CollectorLink, LinkLost
from megatron_rl.rollouts.messages import RUN_KEY_VARIABLE


async def _main(host: str, port: int, node: int, run_key: str) -> None:
    link = CollectorLink(host, port, node, run_key)
    try:
        await serve(link, node)
    except LinkLost as error:
        sys.exit(f"{error}; the collector ends")
    finally:
        link.close()


def _allow_many_connections() -> None:
    """Raise the limit of open files to the hard limit, because each request is a connection."""
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


if __name__ == "__main__":
    _allow_many_connections()
    key = os.environ.pop(RUN_KEY_VARIABLE)
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), key))
