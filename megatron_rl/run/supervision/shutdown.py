"""How the process of a rank ends when its run fails: the reason first, then a close that nothing
can hold.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.records.write_errors import write_problem
from megatron_rl.run.supervision.exit_reporter import ExitReporter
from megatron_rl.run.supervision.local_ranks import LocalRanks
from megatron_rl.run.supervision.watchdog import Stopped, Watchdog

if TYPE_CHECKING:
    from megatron_rl.run.rank import Rank

_NEWS_SECONDS = 3.0
_LINGER_SECONDS = 6.0


def explain(error: BaseException, words: ExitReporter, watch: Watchdog) -> None:
    """Decide what an exception of the main thread means for the run, and say it if it falls to this
    rank.
    """
    if isinstance(error, Stopped):
        words.told_to_stop(error.number)
        return
    from megatron_rl.run.supervision.failures import (  # they import torch
        comes_from_engines,
        describe_failure,
    )

    code, reason = describe_failure(error)
    if comes_from_engines(error):  # a dead engine explains more than what failed because of it
        watch.await_news(_NEWS_SECONDS)
    if code is None:
        words.cause(1, reason, "".join(traceback.format_exception(error)))
    elif code is ExitCode.PEER_FAILED:
        words.consequence(code, reason)
    else:
        words.cause(code, reason)


def close(rank: Rank) -> None:
    """After a run that is complete: nothing that goes wrong now takes anything away from it."""
    try:
        rank.close()
    except Exception as error:
        with contextlib.suppress(OSError, ValueError):
            print(
                f"the run is complete; closing it met {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )


def leave(words: ExitReporter, siblings: LocalRanks, rank: Rank | None) -> NoReturn:
    """Close what can be closed and end the process. A `Watchdog` ends it all the same when that
    takes too long.

    A rank that did not speak ends after the one that did: torchrun names the first to end as the
    root cause.
    """
    _hush()
    with contextlib.suppress(Exception):
        if rank is not None:
            rank.abandon()
    deadline = time.monotonic() + _LINGER_SECONDS
    while not words.spoke and siblings.agent and time.monotonic() < deadline:
        if siblings.orphaned or siblings.dead():
            break
        time.sleep(0.1)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(1 if words.code is None else words.code)


def leave_thread(failed: threading.ExceptHookArgs) -> None:
    """Threads that cannot write a file are silent: whoever waits for the file says it, once."""
    if failed.exc_value is None or write_problem(failed.exc_value) is None:
        threading.__excepthook__(failed)


def _hush() -> None:
    """What libraries print while they are torn down would bury the reason."""
    with contextlib.suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
