"""Weight updates of all engines, from the trainer's source rank."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence

from sglang_bridge.admin import AdminClient
from sglang_bridge.errors import EngineError, WeightUpdateFailed
from sglang_bridge.weights.buckets import NamedTensors, iterate_buckets
from sglang_bridge.weights.calls import Failures, call_each
from sglang_bridge.weights.transport import WeightTransport


class WeightUpdater:
    """Sends weights to engines.

    Requests that run during an update are recomputed under the new weights.
    """

    def __init__(self, *, transport: WeightTransport, bucket_bytes: int) -> None:
        if bucket_bytes < 1:
            raise ValueError(
                f"sync.bucket_mb gives buckets of {bucket_bytes} bytes: it must be positive"
            )
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        # Engines whose last update is complete. Any other may have an open one, because of a
        # failure or of another run.
        self._clean_admins: set[AdminClient] = set()

    def push(
        self, named_tensors: NamedTensors, version: int, admins: Sequence[AdminClient]
    ) -> None:
        """Send engines these weights, under Hugging Face names, as `version`.

        Peak memory is one bucket and one tensor.

        Raises `WeightUpdateFailed` after the stream is exhausted. By then, the other engines serve
        the version.
        """
        stream = iter(named_tensors)
        update = _Update(admins)
        try:
            self._prepare(update, version)
            for bucket in iterate_buckets(
                stream, bucket_bytes=self._bucket_bytes, device=self._transport.device
            ):
                if update.alive:
                    update.record(self._transport.send(bucket, update.alive, version))
            self._complete(update, version)
        except Exception:
            for admin in admins:
                self._transport.forget(admin)
            # The other ranks of the export still iterate, so the stream must be exhausted.
            collections.deque(stream, maxlen=0)
            raise
        for admin in admins:
            if admin.url in update.failures:
                self._transport.forget(admin)
        if update.failures:
            raise WeightUpdateFailed(
                version, update.failures, [admin.url for admin in update.alive]
            )

    def forget(self, admin: AdminClient) -> None:
        """Drop the connection to an engine that gets no further update from this client."""
        self._clean_admins.discard(admin)
        self._transport.forget(admin)

    def close(self) -> None:
        """Leave every engine."""
        self._transport.close()

    def _prepare(self, update: _Update, version: int) -> None:
        update.record(call_each(update.alive, lambda admin: admin.pause()))
        update.record(call_each(update.alive, self._close_old_session))
        update.record(self._transport.connect(update.alive))
        update.record(self._transport.begin(update.alive, version))

    def _complete(self, update: _Update, version: int) -> None:
        update.record(self._transport.end(update.alive, version))
        update.record(call_each(update.alive, lambda admin: admin.flush_cache()))
        update.record(call_each(update.alive, lambda admin: admin.resume()))
        self._clean_admins |= set(update.alive)

    def _close_old_session(self, admin: AdminClient) -> None:
        """Close the session that a failed update, or a trainer that died, may have left open."""
        if admin not in self._clean_admins:
            with contextlib.suppress(EngineError):  # the engine refuses if no session is open
                admin.end_weight_update()
        self._clean_admins.discard(admin)


class _Update:
    """Engines that still take part in one update."""

    def __init__(self, admins: Sequence[AdminClient]) -> None:
        self._admins = admins
        self.failures: Failures = {}

    @property
    def alive(self) -> list[AdminClient]:
        return [admin for admin in self._admins if admin.url not in self.failures]

    def record(self, failures: Failures) -> None:
        """Keep each engine's first failure."""
        self.failures = failures | self.failures
