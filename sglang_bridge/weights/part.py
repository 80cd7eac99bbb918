"""One rank's part in weight updates: it keeps lanes to the engines, and sends what it owns."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from sglang_bridge.admin import AdminClient
from sglang_bridge.engine import Engine
from sglang_bridge.weights.buckets import NamedTensors
from sglang_bridge.weights.crew import Crew, Go, Order, Readiness, SendReport, Target
from sglang_bridge.weights.source import WeightSource
from sglang_bridge.weights.transport import WeightTransport


class RankPart:
    """Sends what this rank owns, as rank 0 orders it.

    open_admin: opens the control client of an engine. dtype_of: of the engines' weights, by name;
    None lets every dtype pass. is_central: rank 0 sends all tensors, which are gathered on it.
    is_everywhere: every rank sends all tensors, to the engine beside it.
    free_memory: frees what the rank does not need of a device that an engine uses, too.
    """

    def __init__(
        self,
        transport: WeightTransport,
        crew: Crew,
        *,
        bucket_bytes: int,
        open_admin: Callable[[Engine], AdminClient],
        dtype_of: Callable[[str], torch.dtype] | None = None,
        is_central: bool = False,
        is_everywhere: bool = False,
        free_memory: Callable[[], None] = lambda: None,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(
                f"sync.bucket_mb gives buckets of {bucket_bytes} bytes: it must be positive"
            )
        self.transport = transport
        self.crew = crew
        self._bucket_bytes = bucket_bytes
        self._open_admin = open_admin
        self._dtype_of = dtype_of
        self._is_central = is_central
        self._is_everywhere = is_everywhere
        self._free_memory = free_memory
        self._admins: dict[str, AdminClient] = {}  # by connection
        self._connections: tuple[str, ...] = ()  # in the last update

    def follow(self, source: WeightSource) -> None:
        """Take part in one update that rank 0 leads (a collective)."""
        order = msgspec.msgpack.decode(self.crew.tell(None), type=Order)
        self.connect(order, source)
        go = msgspec.msgpack.decode(self.crew.tell(None), type=Go)
        self.send(go, order, source)

    def register(self, connection: str, admin: AdminClient) -> None:
        """Use a control client that is open already."""
        self._admins[connection] = admin

    def connect(self, order: Order, source: WeightSource) -> list[Readiness]:
        """Open the lanes of an update, if this rank owns tensors; returns what each rank says.

        Owners open new lanes one after another. If an engine had several requests to join and the
        trainer died, it would look for the later owners for half an hour. Engines that share the
        ranks' devices may take memory afterwards. A collective.
        """
        self._free_memory()
        for connection in order.old_connections:
            self._forget(connection)
        is_owner = self._is_owner(source)
        results = self._share(Readiness(is_owner, {}, self._unit_bytes(source)))
        owners = [rank for rank, result in enumerate(results) if result.is_owner]
        connections = tuple(target.connection for target in order.targets)
        is_new = connections != self._connections and not self._is_everywhere
        turns = [{owner} for owner in owners] if is_new else [{*owners}]
        for ranks in turns:
            failures: dict[str, str] = {}
            if self.crew.rank in ranks:
                failures = self._connect_to(order.targets, results)
            reports = self._share(Readiness(is_owner, failures))
            results = [_add(*pair) for pair in zip(results, reports, strict=True)]
        self._connections = connections
        return results

    def _connect_to(
        self, targets: Sequence[Target], results: Sequence[Readiness]
    ) -> dict[str, str]:
        """Open lanes to engines that have not failed for another rank; returns failures."""
        admins = []
        for target in targets:
            if any(target.engine.url in result.failures for result in results):
                continue
            if target.connection not in self._admins:
                self._admins[target.connection] = self._open_admin(target.engine)
            admins.append(self._admins[target.connection])
        return dict(self.transport.connect(admins)) if admins else {}

    def _share(self, readiness: Readiness) -> list[Readiness]:
        """Return what each rank says. A collective."""
        parts = self.crew.gather(msgspec.msgpack.encode(readiness))
        return [msgspec.msgpack.decode(part, type=Readiness) for part in parts]

    def send(self, go: Go, order: Order, source: WeightSource) -> list[SendReport]:
        """Send what this rank owns; returns the reports of all ranks. A collective.

        An engine that failed for one rank is forgotten by all.
        """
        report = self._send_owned(go, order, source)
        self._free_memory()
        data = msgspec.msgpack.encode(report)
        reports = [msgspec.msgpack.decode(part, type=SendReport) for part in self.crew.gather(data)]
        failures = {url for other in reports for url in other.failures}
        for target in order.targets:
            if target.engine.url in failures or target.connection not in go.connections:
                self._forget(target.connection)
        return reports

    def _send_owned(self, go: Go, order: Order, source: WeightSource) -> SendReport:
        deadline = time.monotonic() + go.seconds
        tensors = self._stream(source)
        if not self._is_owner(source) or not go.connections:
            # The ranks that share tensors with this one still iterate
            collections.deque(tensors, maxlen=0)
            return SendReport(seconds=source.seconds)
        turn = go.owners.index(self.crew.rank)
        connections = rotate(go.connections, turn)
        try:
            report = self.transport.send(
                self._check_dtypes(tensors),
                [self._admins[connection] for connection in connections],
                order.version,
                bucket_bytes=max(self._bucket_bytes, go.unit_bytes),
                deadline=deadline,
            )
        except Exception:
            collections.deque(tensors, maxlen=0)
            raise
        return msgspec.structs.replace(report, seconds=report.seconds | source.seconds)

    def _is_owner(self, source: WeightSource) -> bool:
        if self._is_everywhere:
            return True
        return not self.crew.rank if self._is_central else source.owns_any

    def _stream(self, source: WeightSource) -> NamedTensors:
        if self._is_everywhere:
            return source.stream_everywhere()
        return source.stream_all() if self._is_central else source.stream_owned()

    def _unit_bytes(self, source: WeightSource) -> int:
        """Buckets of other transports may have any size."""
        return source.unit_bytes if self._is_everywhere else 0

    def _check_dtypes(self, tensors: NamedTensors) -> NamedTensors:
        """Raise `ValueError` for a tensor of another dtype: an engine would convert it silently."""
        for name, tensor in tensors:
            engine_dtype = tensor.dtype if self._dtype_of is None else self._dtype_of(name)
            if tensor.dtype != engine_dtype:
                raise ValueError(
                    f"weight {name}: {tensor.dtype} is sent, but engines hold {engine_dtype}. The "
                    "export must convert it to engine.dtype"
                )
            yield name, tensor

    def _forget(self, connection: str) -> None:
        admin = self._admins.pop(connection, None)
        if admin is not None:
            self.transport.forget(admin)

    def close(self) -> None:
        """Leave every engine."""
        self.transport.close()


def _add(earlier: Readiness, later: Readiness) -> Readiness:
    """Add the failures of a rank's later turn to the failures of earlier turns."""
    return msgspec.structs.replace(earlier, failures=later.failures | earlier.failures)


def rotate(items: Sequence[str], turn: int) -> list[str]:
    """Return the items from number `turn` on, around the end."""
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def merge_seconds(reports: Sequence[SendReport]) -> Mapping[str, float]:
    """The seconds of the slowest rank, by part of the work."""
    names = {name for report in reports for name in report.seconds}
    return {name: max(report.seconds.get(name, 0.0) for report in reports) for name in names}
