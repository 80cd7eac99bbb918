"""Collector process: `python -m megatron_rl.rollouts.collector HOST PORT NODE EPOCH`.

EPOCH counts the starts of the collector on its node.

The environment variable MEGATRON_RL_RUN_KEY holds the run's key.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import traceback

from megatron_rl.contracts.open_files import raise_open_file_limit
from megatron_rl.rollouts.collector.collector import serve
from megatron_rl.rollouts.collector.link import CollectorLink, LinkLost
from megatron_rl.rollouts.wire.messages import RUN_KEY_VARIABLE

_SHUTDOWN_SECONDS = 3.0


async def _serve(host: str, port: int, node: int, epoch: int, run_key: str) -> int:
    """Run the collector to its end and return its exit code."""
    link = CollectorLink(host, port, node, epoch, run_key)
    try:
        await serve(link, node)
    except LinkLost as error:
        print(f"{error}; the collector ends", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        link.close()
    return 0


def _limit_shutdown(code: int) -> None:
    """End the process in a few seconds with this code.

    Python itself would wait for abandoned calls and for threads of user-defined classes.
    """
    sys.stderr.flush()
    timer = threading.Timer(_SHUTDOWN_SECONDS, os._exit, [code])
    timer.daemon = True
    timer.start()


def main(arguments: list[str]) -> int:
    """Run a collector and return its exit code."""
    raise_open_file_limit()
    key = os.environ.pop(RUN_KEY_VARIABLE)
    host, port, node, epoch = arguments
    # Modules live as long as the process, so collections need not look at them
    gc.freeze()
    code = 1
    with asyncio.Runner() as runner:
        try:
            code = runner.run(_serve(host, int(port), int(node), int(epoch), key))
        finally:
            _limit_shutdown(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
