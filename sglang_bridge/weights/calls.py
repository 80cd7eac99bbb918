"""Control calls to several engines at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import EngineError

Failures = dict[str, str]
TOO_LATE = "no answer before sync.timeout_s"


def start_call(function: Callable[[], object]) -> Future[None]:
    """Run `function` in a daemon thread."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # the future raises it to its reader
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return future


def call_each(
    admins: Sequence[AdminClient],
    function: Callable[[AdminClient], object],
    *,
    deadline: float | None = None,
) -> Failures:
    """Call `function` for every engine in parallel, and return the reasons of failures by URL.

    deadline: by `time.monotonic`. A call that is not over by then has failed.
    """
    futures = {admin.url: start_call(partial(function, admin)) for admin in admins}
    failures = {}
    for url, future in futures.items():
        try:
            future.result(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            failures[url] = TOO_LATE
        except (EngineError, ValueError, OSError) as error:  # OSError: no route to the host
            failures[url] = str(error)
    return failures
