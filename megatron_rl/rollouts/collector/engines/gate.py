"""The gate that requests to engines pass, and the requests that engines work on."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from sglang_bridge.client import GenerateClient

# A request may be on its way to the engine when it is aborted, so it is aborted again.
ABORT_SECONDS = 0.25


@dataclass(frozen=True, eq=False)
class _RunningRequest:
    """A request that an engine works on. end: done once its tokens are counted."""

    client: GenerateClient
    group: str
    end: asyncio.Future[None]


class Gate:
    """Open or shut for all requests, and shut for the groups that were stopped."""

    def __init__(self) -> None:
        self._opening = asyncio.Event()
        self._opening.set()
        self._num_shuts = 0
        self._rest = asyncio.Event()  # no engine works on a request
        self._rest.set()
        self._running: set[_RunningRequest] = set()
        self._stopped_groups: set[str] = set()
        self._num_sampled_of = Counter[str]()  # tokens, by group
        self.num_sampled = 0  # tokens that engines have sent

    @property
    def is_open(self) -> bool:
        """True if requests may be sent."""
        return self._opening.is_set()

    def open(self) -> None:
        """Let requests be sent."""
        self._opening.set()

    def shut(self) -> None:
        """Let no further request be sent, until `open`."""
        if self.is_open:
            self._num_shuts += 1
        self._opening.clear()

    async def wait_until_open(self) -> None:
        """Wait until requests may be sent."""
        await self._opening.wait()

    async def rest(self) -> None:
        """Wait until no engine works on a request."""
        await self._rest.wait()

    async def rests_within(self, seconds: float) -> bool:
        """Wait so long at most for `rest`.

        Returns False if engines still work on requests, and the gate was shut all the time: a gate
        that was opened meanwhile has let other requests through.
        """
        num_shuts = self._num_shuts
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._rest.wait(), seconds)
        is_overdue = not self._rest.is_set() and not self.is_open
        return not is_overdue or num_shuts != self._num_shuts

    def is_stopped(self, group: str) -> bool:
        """Return True if nothing may be requested for a group."""
        return group in self._stopped_groups

    async def stop(self, group: str) -> int:
        """Request nothing more for a group, until `forget`. Its running requests are aborted.

        Returns the number of tokens that engines have sent for it, once no engine works on it.
        """
        self._stopped_groups.add(group)
        # The group may be forgotten meanwhile. The next request with its id has to go on
        while self.is_stopped(group) and (requests := self._requests_of(group)):
            for client in {request.client for request in requests}:
                await client.abort(f"{group}/")
            await asyncio.wait([request.end for request in requests], timeout=ABORT_SECONDS)
        return self._num_sampled_of[group]

    def _requests_of(self, group: str) -> list[_RunningRequest]:
        return [request for request in self._running if request.group == group]

    def forget(self, group: str) -> None:
        """Count nothing for a group. It may be requested again."""
        self._stopped_groups.discard(group)
        self._num_sampled_of.pop(group, None)

    @contextlib.contextmanager
    def pass_request(self, client: GenerateClient, group: str) -> Iterator[None]:
        """Count a request that an engine works on."""
        end = asyncio.get_running_loop().create_future()
        request = _RunningRequest(client, group, end)
        self._running.add(request)
        self._rest.clear()
        try:
            yield
        finally:
            self._running.remove(request)
            end.set_result(None)
            if not self._running:
                self._rest.set()

    def count_tokens(self, group: str, num_tokens: int) -> None:
        """Count tokens that an engine has sent for a group."""
        self.num_sampled += num_tokens
        self._num_sampled_of[group] += num_tokens
