"""Collector process: `python -m megatron_rl.rollouts HOST PORT NODE`.

The environment variable MEGATRON_RL_RUN_KEY holds the run's key.
"""

from __future__ import annotations

import asyncio
import os
import sys

from megatron_rl.contracts.open_files import raise_open_file_limit
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


if __name__ == "__main__":
    raise_open_file_limit()
    key = os.environ.pop(RUN_KEY_VARIABLE)
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), key))
