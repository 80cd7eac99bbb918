"""Hands buckets to one rank of an engine in memory that both map, as checkpoint-engine does."""

from __future__ import annotations

import time
from collections.abc import Callable
from pickle import dumps
from typing import Any

import torch
import zmq
from torch.multiprocessing.reductions import reduce_tensor

from sglang_bridge.errors import RequestFailed
from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import TOO_LATE

_POLL_MILLISECONDS = 100
_FIRST_NOTICE_SECONDS = 10.0
_LAST_MESSAGE_MILLISECONDS = 1000
_MAX_WORDS = 2000  # of an engine's error

Share = Callable[[torch.Tensor], tuple[Callable[..., torch.Tensor], tuple[Any, ...]]]


class Handover:
    """The trainer's side of one update, towards one rank of an engine.

    The other side is `update_weights_from_ipc` of checkpoint-engine 0.4.2, which SGLang calls in
    the rank's process. This side sends a handle of device memory, then a list for each bucket that
    it puts there: names, shapes, dtypes and offsets. `None` follows twice: the engine unmaps the
    memory, and then processes the weights.

    Trust: the protocol's messages to the engine are pickled, so the engine trusts whoever can bind
    the address. Nothing that comes back is unpickled: a reply is empty, or the text of an error.

    Methods raise `RequestFailed`. Nothing can be sent after that.

    socket: a bound REQ socket. deadline: by `time.monotonic`. refusal: returns why the engine does
    not take part, None while no reason is known. log: writes a line about a wait of more than ten
    seconds. share: makes the handle of a tensor's memory.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        deadline: float,
        *,
        refusal: Callable[[], str | None] = lambda: None,
        log: Callable[[str], None] = print,
        share: Share = reduce_tensor,
    ) -> None:
        self._socket = socket
        self._deadline = deadline
        self._refusal = refusal
        self._log = log
        self._share = share
        self._may_send = True

    def open(self, memory: torch.Tensor) -> None:
        """Let the engine map memory, uint8 [bytes], which must live until `finish` returns."""
        words = self._exchange(self._share(memory), "map the memory of the weights")
        if words:
            self._send_last(b"")  # the engine waits for it before it fails
            raise RequestFailed(f"the engine could not map the memory of the weights: {words}")

    def load(self, bucket: Bucket) -> None:
        """Let the engine load a bucket, which starts at the memory's first byte."""
        start = 0
        items = []
        for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
            items.append({"name": name, "shape": tuple(shape), "dtype": dtype, "offset": start})
            start += dtype.itemsize * shape.numel()
        task = f"load {bucket.names[0]} to {bucket.names[-1]}"
        words = self._exchange(items, task)
        if words:
            raise RequestFailed(f"the engine could not {task}: {words}")

    def finish(self) -> None:
        """Let the engine unmap the memory, and process the weights. It hides errors of the last."""
        for task in ("unmap the memory of the weights", "process the weights"):
            words = self._exchange(None, task)
            if words:
                raise RequestFailed(f"the engine could not {task}: {words}")

    def cancel(self, reason: str) -> None:
        """Let the engine end the update with an error, if it can still be told."""
        if self._may_send:
            self._send_last(dumps(RuntimeError(reason)))

    def _send_last(self, data: bytes) -> None:
        """Send a message that nothing follows, unless the engine has not connected, or is gone."""
        self._may_send = False
        if self._socket.poll(_LAST_MESSAGE_MILLISECONDS, zmq.POLLOUT):
            self._socket.send(data, zmq.NOBLOCK)

    def _exchange(self, message: object, task: str) -> str:
        """Send a message, and return the words of the reply."""
        self._may_send = False
        # Without an engine that has connected, a send would wait without end
        self._wait(zmq.POLLOUT, task)
        self._socket.send(dumps(message))
        self._wait(zmq.POLLIN, task)
        self._may_send = True
        return self._socket.recv()[-_MAX_WORDS:].decode(errors="replace")

    def _wait(self, event: int, task: str) -> None:
        """Wait until the socket can send or has received something."""
        start = time.monotonic()
        notice = start + _FIRST_NOTICE_SECONDS
        while not self._socket.poll(_POLL_MILLISECONDS, event):
            refusal = self._refusal()
            if refusal is not None:
                raise RequestFailed(refusal)
            now = time.monotonic()
            if now > self._deadline:
                raise RequestFailed(f"{TOO_LATE} (it should {task})")
            if now > notice:
                self._log(f"sync: waiting {now - start:.0f} s for an engine to {task}")
                notice = now + (now - start)
