"""One process group that holds this process (rank 0) and the tensor-parallel ranks of some engines."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as concurrent_wait
from functools import partial
from typing import Any

import torch.distributed as dist

from sglang_bridge.errors import EngineError, RequestFailed
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import EngineLink, Failures, start_call
from sglang_bridge.weights.group import join_as_source, leave, open_store

_POLL_SECONDS = 0.02


class EngineGroup:
    """Make it with `EngineGroup.open`."""

    def __init__(
        self, name: str, links: Sequence[EngineLink], store: dist.TCPStore, group: dist.ProcessGroup, timeout: float
    ) -> None:
        self.links = tuple(links)
        self._name = name
        self._store = store
        self._group = group
        self._timeout = timeout

    @classmethod
    def open(cls, links: Sequence[EngineLink], *, address: str, backend: str, timeout: float) -> EngineGroup:
        """Let the engines join a new group, and join it. Raises `EngineError` when one does not within the timeout."""
        name = f"weights-{uuid.uuid4().hex[:12]}"
        store = open_store(address, timeout_seconds=timeout)
        offsets = list(itertools.accumulate((link.handle.tp for link in links), initial=1))
        world_size = offsets.pop()
        replies = [
            start_call(
                partial(
                    link.admin.init_weights_update_group,
                    address=address,
                    port=store.port,
                    rank_offset=offset,
                    world_size=world_size,
                    name=name,
                    backend=backend,
                    timeout=timeout,
                )
            )
            for link, offset in zip(links, offsets, strict=True)
        ]
        _wait_for_arrival(store, replies, timeout)
        try:
            group = join_as_source(store, name=name, world_size=world_size, backend=backend, timeout_seconds=timeout)
        except RuntimeError as error:  # torch.distributed's errors: a peer left, or the timeout
            raise RequestFailed(f"the process group for weights did not form: {error}") from error
        for reply in replies:
            reply.result(timeout)
        return cls(name, links, store, group, timeout)

    def deliver(self, bucket: Bucket, version: str | None) -> Delivery:
        """Start broadcasting one bucket; it must stay unchanged until the delivery is done."""
        request: dict[str, Any] = {
            "names": bucket.names,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
            "shapes": [list(shape) for shape in bucket.shapes],
            "group_name": self._name,
            "weight_version": version,
            "timeout": self._timeout,
        }
        replies = {
            link.url: start_call(partial(link.admin.update_weights_from_distributed, **request)) for link in self.links
        }
        try:
            broadcast = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        except RuntimeError as error:
            return Delivery(replies, None, failed=f"the broadcast could not start: {error}")
        return Delivery(replies, broadcast)

    def abandon(self) -> None:
        """Let go after a failure. A pending broadcast ends at the group's timeout, in nobody's way."""
        start_call(lambda: leave(self._group))

    def close(self) -> None:
        """Leave in good order, engines first."""
        for link in self.links:
            try:
                link.admin.destroy_weights_update_group(self._name)
            except EngineError:
                continue  # it is gone, or it never minded
        leave(self._group)


class Delivery:
    """A bucket on its way to one group."""

    def __init__(
        self, replies: dict[str, Future[None]], broadcast: dist.Work | None, *, failed: str | None = None
    ) -> None:
        self._replies = replies
        self._broadcast = broadcast
        self._failed = failed

    def finish(self, deadline: float) -> Failures:
        """Wait until it has arrived, has failed, or `time.monotonic()` passes `deadline`; who failed, and why."""
        while not self._is_done():
            if time.monotonic() > deadline:
                self._failed = self._failed or "no answer before sync.timeout_s"
                break
            _wait_for_one([reply for reply in self._replies.values() if not reply.done()])
        if self._failed is None and not self._errors():
            return {}
        errors = self._errors()
        first = next(iter(errors.values()), self._failed)
        return {url: errors.get(url, f"its process group broke: {first}") for url in self._replies}

    def _is_done(self) -> bool:
        """All replies and the broadcast are in, or one of them failed."""
        if self._failed is not None or self._errors():
            return True
        assert self._broadcast is not None
        if not self._broadcast.is_completed():
            return False
        try:
            self._broadcast.wait()
        except RuntimeError as error:
            self._failed = f"the broadcast broke: {error}"
            return True
        return all(reply.done() for reply in self._replies.values())

    def _errors(self) -> Failures:
        done = {url: reply.exception() for url, reply in self._replies.items() if reply.done()}
        return {url: str(error) for url, error in done.items() if error is not None}


def _wait_for_one(replies: Sequence[Future[None]]) -> None:
    """Sleep until the first reply, or for one polling interval."""
    if replies:
        concurrent_wait(replies, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
    else:
        time.sleep(_POLL_SECONDS / 10)


def _wait_for_arrival(store: dist.TCPStore, replies: Sequence[Future[None]], timeout: float) -> None:
    """Wait until an engine has reached the rendezvous: joining before would block even if all of them refuse."""
    deadline = time.monotonic() + timeout
    while store.num_keys() == 0:
        for reply in replies:
            if reply.done():
                reply.result()
        if time.monotonic() > deadline:
            raise RequestFailed(f"no engine joined the process group for weights within {timeout:.0f} s")
        time.sleep(_POLL_SECONDS)
