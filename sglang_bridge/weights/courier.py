"""Carries buckets from one owner to engines, while the next bucket is being gathered."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from sglang_bridge.weights.buckets import Bucket
from sglang_bridge.weights.calls import TOO_LATE, Failures
from sglang_bridge.weights.weight_group import Delivery, WeightGroup

# By words of an engine
_REMEDIES = {
    "memory": ". Lower sync.bucket_mb",
    "must run between": ". Another trainer has closed the session: give each run its own engines",
}
_POLL_SECONDS = 0.002
# After that, the next engine's turn begins beside this one.
_TURN_SECONDS = 5.0


class Lane:
    """One owner's connection to an engine, or to a tree of engines, within one update.

    urls: of the engines. num_bytes: sent so far. failure: why they get no further bucket, None
    while they do.
    """

    def __init__(self, urls: Sequence[str], group: WeightGroup) -> None:
        self.urls = tuple(urls)
        self.num_bytes = 0
        self._group = group
        self._start = 0.0
        self._task = ""
        self._delivery: Delivery | None = None
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """See the class."""
        reason = None if self._delivery is None else self._delivery.failure
        if self._failure is None and reason is not None:
            remedies = [remedy for words, remedy in _REMEDIES.items() if words in reason]
            self._failure = f"{reason} (it should {self._task}){''.join(remedies)}{self._tree}"
        return self._failure

    @property
    def _tree(self) -> str:
        """Names the engines that fail together."""
        if len(self.urls) == 1:
            return ""
        return f". {', '.join(self.urls)} share a tree (sync.engines_per_tree)"

    @property
    def is_sent(self) -> bool:
        """True if no bucket is on its way."""
        return self._delivery is None or self.failure is not None or self._delivery.is_sent

    @property
    def is_loaded(self) -> bool:
        """True if the engine has loaded all buckets.

        Only then may it get another one: the two requests could overtake each other.
        """
        return self._delivery is None or self.failure is not None or self._delivery.is_loaded

    def start(self, bucket: Bucket) -> None:
        """Begin to send a bucket."""
        self._start = time.monotonic()
        self._task = _task_of(bucket)
        self._delivery = self._group.deliver(bucket)
        self.num_bytes += bucket.flat.numel()

    def expire(self, patience: float, deadline: float) -> None:
        """Fail if the engine has not loaded a bucket in time. deadline: by `time.monotonic`."""
        if not self.is_loaded and time.monotonic() > min(self._start + patience, deadline):
            self._failure = self.failure or f"{TOO_LATE} (it should {self._task}){self._tree}"


class Courier:
    """Sends an owner's buckets to all engines in a thread, each bucket to one engine after another.

    Owners that begin with different engines share the links: an engine takes one bucket at a time.
    An engine that fails costs its own lane only. Engines that do not answer at all cost half of the
    time that is left, all together.

    lanes: in the order of the turns. deadline: by `time.monotonic`. device: of the buckets.
    log: writes a line about a wait of more than `notice_seconds`.
    seconds: "send": for buckets to leave; "load": for engines to load them.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        deadline: float,
        device: torch.device,
        log: Callable[[str], None],
        notice_seconds: float = 10.0,
    ) -> None:
        self.seconds = {"send": 0.0, "load": 0.0}
        self._lanes = list(lanes)
        self._deadline = deadline
        self._patience = max(deadline - time.monotonic(), 0.0) / 2
        self._device = device
        self._log = log
        self._notice_seconds = notice_seconds
        self._buckets = queue.SimpleQueue[Bucket | None]()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    @property
    def failures(self) -> Failures:
        """The reasons of failures by URL."""
        return {
            url: lane.failure
            for lane in self._lanes
            if lane.failure is not None
            for url in lane.urls
        }

    def put(self, bucket: Bucket) -> None:
        """Send a bucket after the earlier ones. It is released once it has left."""
        self._buckets.put(bucket)

    def finish(self) -> None:
        """Wait until every engine has loaded every bucket, or failed."""
        self._buckets.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        while (bucket := self._buckets.get()) is not None:
            self._attempt(partial(self._carry, bucket))
            bucket.release()
        self._attempt(self._wait_until_loaded)

    def _attempt(self, function: Callable[[], None]) -> None:
        """Do something, unless an earlier error waits for `finish` to raise it."""
        if self._error is not None:
            return
        try:
            function()
        except BaseException as error:
            self._error = error

    def _carry(self, bucket: Bucket) -> None:
        """Give every engine its turn; return once the bucket has left for all of them."""
        what = _task_of(bucket)
        turn_seconds = min(_TURN_SECONDS, self._patience / 8)
        waiting = self._open_lanes()
        while waiting:
            self._wait("load", partial(_first_ready, waiting), what)
            lane = _first_ready(waiting)
            assert lane is not None
            waiting.remove(lane)
            if lane.failure is None:
                lane.start(bucket)
                self._wait("send", partial(getattr, lane, "is_sent"), what, seconds=turn_seconds)
        self._wait("send", lambda: all(lane.is_sent for lane in self._lanes), what)

    def _wait_until_loaded(self) -> None:
        what = "load the last bucket"
        self._wait("load", lambda: all(lane.is_loaded for lane in self._lanes), what)

    def _open_lanes(self) -> list[Lane]:
        return [lane for lane in self._lanes if lane.failure is None]

    def _wait(
        self, part: str, is_over: Callable[[], object], what: str, *, seconds: float = math.inf
    ) -> None:
        """Wait until something is over, but not longer than some seconds.

        Engines that do not answer in time fail meanwhile, which ends every wait for them.
        """
        start = time.monotonic()
        notice = start + self._notice_seconds
        while not is_over():
            for lane in self._lanes:
                lane.expire(self._patience, self._deadline)
            now = time.monotonic()
            if now > start + seconds:
                break
            if now > notice:
                urls = ", ".join(
                    url for lane in self._lanes if not lane.is_loaded for url in lane.urls
                )
                self._log(f"sync: waiting {now - start:.0f} s for {urls} to {what}")
                notice = now + (now - start)
            time.sleep(_POLL_SECONDS)
        self.seconds[part] += time.monotonic() - start


def _first_ready(lanes: Sequence[Lane]) -> Lane | None:
    """The first engine that can take a bucket, or that failed."""
    return next((lane for lane in lanes if lane.is_loaded), None)


def _task_of(bucket: Bucket) -> str:
    """Describe what an engine has to do with a bucket."""
    size = bucket.flat.numel() / 2**20
    names = bucket.names
    if len(names) == 1:
        return f"take {names[0]}, {size:.1f} MB"
    return f"take {len(names)} tensors, {names[0]} to {names[-1]}, {size:.1f} MB"
