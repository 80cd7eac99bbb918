"""Control calls to several engines at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import EngineError
from sglang_bridge.handle import EngineHandle

Failures = dict[str, str]


@dataclass(frozen=True)
class EngineLink:
    """An engine and the client that controls it."""

    handle: EngineHandle
    admin: AdminClient

    @property
    def url(self) -> str:
        """Its name in failures."""
        return self.handle.url


def start_call(function: Callable[[], None]) -> Future[None]:
    """Run `function` in a daemon thread."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            function()
        except BaseException as error:  # handed to whoever asks the future
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return future


def call_each(links: Sequence[EngineLink], function: Callable[[EngineLink], None]) -> Failures:
    """Call `function` for every link in parallel and return the reasons of those that failed, by URL."""
    futures = {link.url: start_call(partial(function, link)) for link in links}
    failures = {}
    for url, future in futures.items():
        try:
            future.result()
        except (EngineError, ValueError) as error:
            failures[url] = str(error)
    return failures
