"""Process group of this process, its source, and the ranks of one or more engines."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
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
    """Connection to engines for weights. Create it with `WeightGroup.open`.

    With several engines, each bucket goes to all of them in one broadcast. If one of them ends
    within a broadcast, the others are stuck in it, because SGLang waits for 30 minutes.

    admins: the control clients of the engines.
    """

    def __init__(
        self,
        name: str,
        admins: Sequence[AdminClient],
        store: dist.TCPStore,
        group: dist.ProcessGroup,
        timeout: float,
    ) -> None:
        self.admins = tuple(admins)
        self._name = name
        self._store = store  # must live as long as the group
        self._group = group
        self._timeout = timeout

    @classmethod
    def open(
        cls,
        admins: Sequence[AdminClient],
        *,
        backend: str,
        timeout: float,
        joining: threading.Lock,
    ) -> WeightGroup:
        """Let the engines join a new group, and join it too.

        All meet at this process's address on the route to the engines' hosts. The ranks follow the
        order of the engines. joining: torch cannot make two groups at the same time. Raises
        `EngineError` when an engine does not join within the timeout.
        """
        name = f"weights-{uuid.uuid4().hex[:12]}"
        address = _common_address(admins)
        store = open_store(address, timeout_seconds=timeout)
        world_size = 1 + sum(admin.engine.tp for admin in admins)
        replies = {}
        rank_offset = 1
        for admin in admins:
            replies[admin.url] = start_call(
                partial(
                    admin.init_weights_update_group,
                    address=address,
                    port=store.port,
                    rank_offset=rank_offset,
                    world_size=world_size,
                    name=name,
                    backend=backend,
                    timeout=timeout,
                )
            )
            rank_offset += admin.engine.tp
        # Each rank of gloo stores its address below the group's name
        num_addresses = world_size - 1 if backend == dist.Backend.GLOO else 0
        _wait_for_arrival(store, name, num_addresses, replies, timeout)
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
            _raise_refusal(replies)
            raise RequestFailed(f"the process group for weights did not form: {error}") from error
        connection = cls(name, admins, store, group, timeout)
        del group  # `abandon` drops the last reference
        try:
            _require_joins(replies, timeout)
        except BaseException:
            connection.abandon()
            raise
        return connection

    def deliver(self, bucket: Bucket) -> Delivery:
        """Start to broadcast one bucket. It must stay unchanged until the delivery is sent."""
        replies = {
            admin.url: start_call(
                partial(
                    admin.update_weights_from_distributed,
                    names=bucket.names,
                    dtypes=[str(dtype).removeprefix("torch.") for dtype in bucket.dtypes],
                    shapes=[list(shape) for shape in bucket.shapes],
                    group_name=self._name,
                    timeout=self._timeout,
                )
            )
            for admin in self.admins
        }
        try:
            broadcast = dist.broadcast(bucket.flat, src=0, group=self._group, async_op=True)
        except RuntimeError as error:
            return Delivery(replies, None, failure=f"the broadcast could not start: {error}")
        return Delivery(replies, broadcast)

    def abandon(self) -> None:
        """Drop the group after a failure, without waiting.

        A thread aborts a pending broadcast of NCCL. One of gloo ends there at the group's timeout.
        """
        # Dropping the last reference waits for the broadcast, so the thread must hold it.
        references = [self._group]
        del self._group
        start_call(lambda: abort(references.pop()))

    def close(self) -> None:
        """Leave the group in order, the engines first."""
        for admin in self.admins:
            with contextlib.suppress(EngineError):  # the engine is gone, or its group
                admin.destroy_weights_update_group(self._name)
        leave(self._group)


class Delivery:
    """Transfer of one bucket to the engines of a group. Each loads it and then replies."""

    def __init__(
        self,
        replies: Mapping[str, Future[None]],
        broadcast: dist.Work | None,
        *,
        failure: str | None = None,
    ) -> None:
        self._replies = replies
        self._broadcast = broadcast
        self._failure = failure

    @property
    def failure(self) -> str | None:
        """The reason why the bucket did not arrive, None while there is none."""
        refusal = _first_refusal(self._replies)
        return self._failure if refusal is None else str(refusal)

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
        """True once every engine has loaded the bucket, or the delivery failed."""
        if not self.is_sent:
            return False
        return self.failure is not None or all(reply.done() for reply in self._replies.values())


def _common_address(admins: Sequence[AdminClient]) -> str:
    """This process's address that all engines reach.

    Engines on this machine reach its address in the network too.
    """
    addresses = [address_towards(*admin.address) for admin in admins]
    for address in addresses:
        if not ipaddress.ip_address(address).is_loopback:
            return address
    return addresses[0]


def _first_refusal(replies: Mapping[str, Future[None]]) -> BaseException | None:
    """The error of the first engine that refused. replies: by URL."""
    for url, reply in replies.items():
        error = reply.exception() if reply.done() else None
        if error is not None and len(replies) > 1 and isinstance(error, EngineError):
            return RequestFailed(f"{url}: {error}")
        if error is not None:
            return error
    return None


def _raise_refusal(replies: Mapping[str, Future[None]]) -> None:
    error = _first_refusal(replies)
    if error is not None:
        raise error


def _require_joins(replies: Mapping[str, Future[None]], timeout: float) -> None:
    """Wait until all engines say that they have joined. Raises the error of one that has not."""
    deadline = time.monotonic() + timeout
    for reply in replies.values():
        try:
            reply.result(max(deadline - time.monotonic(), 0.0))
        except EngineError:
            _raise_refusal(replies)


def _wait_for_arrival(
    store: dist.TCPStore,
    name: str,
    num_addresses: int,
    replies: Mapping[str, Future[None]],
    timeout: float,
) -> None:
    """Wait until an engine has reached the rendezvous, and ranks have stored their addresses.

    Joining earlier would block even if the engines refuse.
    """
    deadline = time.monotonic() + timeout
    while store.num_keys() == 0 or _count_addresses(store, name) < num_addresses:
        _raise_refusal(replies)
        if time.monotonic() > deadline:
            count = _count_addresses(store, name)
            ranks = "no engine" if count == 0 else f"only {count} of {num_addresses} engine ranks"
            raise RequestFailed(
                f"{ranks} joined the process group for weights within {timeout:.0f} s"
            )
        time.sleep(_POLL_SECONDS)


def _count_addresses(store: dist.TCPStore, name: str) -> int:
    return sum(key.startswith(f"{name}/") for key in store.list_keys())
