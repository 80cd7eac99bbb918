"""One weight update of several engines, from the trainer's source rank."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Sequence

from sglang_bridge.admin import AdminClient, PauseMode
from sglang_bridge.errors import EngineError, WeightUpdateFailed
from sglang_bridge.handle import EngineHandle, refuse_unsupported_parallelism
from sglang_bridge.weights.audit import AuditReport, audit_engine
from sglang_bridge.weights.buckets import Bucket, NamedTensors, iterate_buckets
from sglang_bridge.weights.calls import EngineLink, Failures, call_each
from sglang_bridge.weights.expectation import WeightExpectation
from sglang_bridge.weights.transport import WeightTransport

AfterBucket = Callable[[Bucket, Sequence[EngineLink]], Failures]


class WeightUpdater:
    """Sends weights to engines of role `rollout`.

    pause_mode: what happens to requests that run during an update; `retract` recomputes them under the new weights.
    """

    def __init__(
        self,
        handles: Sequence[EngineHandle],
        admins: Sequence[AdminClient],
        *,
        transport: WeightTransport,
        bucket_bytes: int,
        pause_mode: PauseMode = "retract",
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"sync.bucket_mb gives buckets of {bucket_bytes} bytes: it must be positive")
        if pause_mode == "in_place":
            raise ValueError(
                "pause_mode=in_place keeps the cache that the old weights computed, and the engine refuses to flush it "
                "while requests run: later samples would be drawn from both versions at once; use retract or abort"
            )
        self._links = [_link(handle, admin) for handle, admin in zip(handles, admins, strict=True)]
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._pause_mode: PauseMode = pause_mode
        self._connected: set[EngineLink] = set()
        self._unfinished: set[EngineLink] = set()  # alive or not, their last update did not complete

    @property
    def urls(self) -> tuple[str, ...]:
        """The engines it updates."""
        return tuple(link.url for link in self._links)

    def replace(self, index: int, handle: EngineHandle, admin: AdminClient) -> None:
        """Put a restarted engine (same index, next epoch) in the place of its predecessor."""
        self._drop(self._links[index])
        self._links[index] = _link(handle, admin)

    def push(
        self,
        named_tensors: NamedTensors,
        version: int,
        *,
        urls: Collection[str] | None = None,
        alone: Collection[str] = (),
        after_bucket: AfterBucket | None = None,
    ) -> None:
        """Give engines (all, or those in `urls`) these weights, in Hugging Face names, as `version`.

        Peak memory is one bucket and one tensor. alone: tensors that get a bucket of their own. after_bucket: called
        with each bucket and the engines that hold it now; its failures count. Raises `WeightUpdateFailed` after the
        stream is exhausted; engines that took the version serve it by then.
        """
        stream = iter(named_tensors)
        update = _Update([link for link in self._links if urls is None or link.url in urls])
        try:
            self._prepare(update, version)
            for bucket in iterate_buckets(
                stream, bucket_bytes=self._bucket_bytes, device=self._transport.device, alone=alone
            ):
                if update.alive:
                    update.note(self._transport.send(bucket, update.alive, version))
                if after_bucket is not None:
                    update.note(after_bucket(bucket, update.alive))
            self._complete(update, version)
        except Exception:
            for link in update.links:
                self._drop(link)
            collections.deque(stream, maxlen=0)  # the other ranks of the export are still iterating
            raise
        for link in update.links:
            if link.url in update.failures:
                self._drop(link)
        if update.failures:
            raise WeightUpdateFailed(version, update.failures, [link.url for link in update.alive])

    def audit(self, expectation: WeightExpectation, *, urls: Collection[str] | None = None) -> dict[str, AuditReport]:
        """Compare engines, by value, with what a `push` through `expectation.observe` sent. Reports by URL.

        Raises `AuditUnsupported` for an engine that cannot be compared, `RequestFailed` for one that does not answer.
        """
        chosen = [link for link in self._links if urls is None or link.url in urls]
        return {link.url: audit_engine(link.handle, link.admin, expectation) for link in chosen}

    def close(self) -> None:
        """Leave every engine."""
        self._transport.close()
        self._connected.clear()

    def _prepare(self, update: _Update, version: int) -> None:
        update.note(call_each(update.alive, lambda link: link.admin.pause(self._pause_mode)))
        update.note(call_each(update.alive, self._close_old_session))
        new = [link for link in update.alive if link not in self._connected]
        update.note(call_each(new, _check_parallelism))
        update.note(self._transport.connect(update.alive))
        self._connected |= set(update.alive)
        update.note(self._transport.begin(update.alive, version))

    def _complete(self, update: _Update, version: int) -> None:
        update.note(self._transport.end(update.alive, version))
        update.note(call_each(update.alive, lambda link: link.admin.flush_cache()))
        update.note(call_each(update.alive, lambda link: link.admin.resume()))
        self._unfinished -= set(update.alive)

    def _close_old_session(self, link: EngineLink) -> None:
        """An update that failed may have left a session open in an engine that lived on."""
        if link in self._unfinished:
            with contextlib.suppress(EngineError):  # none was open
                link.admin.end_weight_update()
        self._unfinished.add(link)

    def _drop(self, link: EngineLink) -> None:
        self._connected.discard(link)
        self._transport.forget(link)


class _Update:
    """Who is still taking part in one update."""

    def __init__(self, links: list[EngineLink]) -> None:
        self.links = links
        self.failures: Failures = {}

    @property
    def alive(self) -> list[EngineLink]:
        return [link for link in self.links if link.url not in self.failures]

    def note(self, failures: Failures) -> None:
        """Keep each engine's first failure."""
        self.failures = failures | self.failures


def _link(handle: EngineHandle, admin: AdminClient) -> EngineLink:
    if not handle.takes_weights:
        raise ValueError(f"{handle.url} has role {handle.role}: only engines of role rollout take new weights")
    return EngineLink(handle, admin)


def _check_parallelism(link: EngineLink) -> None:
    refuse_unsupported_parallelism(link.admin.server_info(), tp=link.handle.tp)
