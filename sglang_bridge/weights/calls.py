"""Control calls to several engines at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import EngineError

Failures = dict[str, str]


def start_call(function: Callable[[], None]) -> Future[None]:
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


def call_each(admins: Sequence[AdminClient], function: Callable[[AdminClient], None]) -> Failures:
    """Call `function` for every engine in parallel, and return the reasons of failures by URL."""
    futures = {admin.url: start_call(partial(function, admin)) for admin in admins}
    failures = {}
    for url, future in futures.items():
        try:
            future.result()
        except (EngineError, ValueError) as error:
            failures[url] = str(error)
    return failures
