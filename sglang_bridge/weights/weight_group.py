"""Process group of this process, its source, and the tensor-parallel ranks of one engine."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from concurrent.futures import Future
from functools import partial

import torch.distributed as dist

from sglang_bridge.addresses import address_towards
from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import EngineError, RequestFailed
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import start_call
from sglang_bridge.weights.process_group import abort, join_as_source, leave, open_store

_POLL_SECONDS = 0.02


class WeightGroup:
    """Connection to one engine for weights. Create it with `WeightGroup.open`."""

    def __init__(
        self,
        name: str,
        admin: AdminClient,
        store: dist.TCPStore,
        group: dist.ProcessGroup,
        timeout: float,
    ) -> None:
        self._name = name
        self._admin = admin
        self._store = store  # must live as long as the group
        self._group = group
        self._timeout = timeout

    @classmethod
    def open(
        cls, admin: AdminClient, *, backend: str, timeout: float, joining: threading.Lock
    ) -> WeightGroup:
        """Let the engine join a new group, and join it too.

        Both meet at this process's address on the route to the engine's host. joining: torch cannot
        make two groups at the same time. Raises `EngineError` when the engine does not join within
        the timeout.
        """
        name = f"weights-{uuid.uuid4().hex[:12]}"
        address = address_towards(*admin.address)
        store = open_store(address, timeout_seconds=timeout)
        world_size = 1 + admin.engine.tp
        reply = start_call(
            partial(
                admin.init_weights_update_group,
                address=address,
                port=store.port,
                rank_offset=1,
                world_size=world_size,
                name=name,
                backend=backend,
                timeout=timeout,
            )
        )
        _wait_for_arrival(store, reply, timeout)
        try:
            with joining:
                group = join_as_source(
                    store,
                    name=name,
                    world_size=world_size,
                    backend=backend,
                    timeout_seconds=timeout,
                )
        except RuntimeError as error:  # torch.distributed: a peer left, or the timeout passed
            raise RequestFailed(f"the process group for weights did not form: {error}") from error
        reply.result(timeout)
        return cls(name, admin, store, group, timeout)

    def deliver(self, bucket: Bucket) -> Delivery:
        """Start to broadcast one bucket. It must stay unchanged until the delivery is sent."""
        reply = start_call(
            partial(
                self._admin.update_weights_from_distributed,
                names=bucket.names,
                dtypes=[str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
                shapes=[list(shape) for shape in bucket.shapes],
                group_name=self._name,
                timeout=self._timeout,
            )
        )
        try:
            broadcast = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        except RuntimeError as error:
            return Delivery(reply, None, failure=f"the broadcast could not start: {error}")
        return Delivery(reply, broadcast)

    def abandon(self) -> None:
        """Drop the group after a failure, without waiting.

        A thread aborts a pending broadcast of NCCL. One of gloo ends there at the group's timeout.
        """
        # Dropping the last reference waits for the broadcast, so the thread must hold it.
        references = [self._group]
        del self._group
        start_call(lambda: abort(references.pop()))

    def close(self) -> None:
        """Leave the group in order, the engine first."""
        with contextlib.suppress(EngineError):  # the engine is gone, or its group
            self._admin.destroy_weights_update_group(self._name)
        leave(self._group)


class Delivery:
    """Transfer of one bucket to one engine, which loads it and then replies."""

    def __init__(
        self, reply: Future[None], broadcast: dist.Work | None, *, failure: str | None = None
    ) -> None:
        self._reply = reply
        self._broadcast = broadcast
        self._failure = failure

    @property
    def failure(self) -> str | None:
        """The reason why the bucket did not arrive, None while there is none."""
        error = self._reply.exception() if self._reply.done() else None
        return self._failure if error is None else str(error)

    @property
    def is_sent(self) -> bool:
        """True once the bucket has left this process, or the delivery failed."""
        if self.failure is not None:
            return True
        assert self._broadcast is not None
        if not self._broadcast.is_completed():
            return False
        try:
            self._broadcast.wait()
        except RuntimeError as error:
            self._failure = f"the broadcast broke: {error}"
        return True

    @property
    def is_loaded(self) -> bool:
        """True once the engine has loaded the bucket, or the delivery failed."""
        return self.is_sent and (self.failure is not None or self._reply.done())


def _wait_for_arrival(store: dist.TCPStore, reply: Future[None], timeout: float) -> None:
    """Wait until the engine has reached the rendezvous.

    Joining earlier would block even if the engine refuses.
    """
    deadline = time.monotonic() + timeout
    while store.num_keys() == 0:
        if reply.done():
            reply.result()
        if time.monotonic() > deadline:
            raise RequestFailed(
                f"no engine joined the process group for weights within {timeout:.0f} s"
            )
        time.sleep(_POLL_SECONDS)
