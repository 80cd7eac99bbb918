"""A rank's contribution to a weight update, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from sglang_bridge.weights.buckets import NamedTensors


class StreamWatch:
    """Measures the seconds that streams need for their tensors, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def measure(self, name: str, stream: NamedTensors) -> NamedTensors:
        """Pass a stream on. A stream inside it that is measured too does not count."""
        while True:
            start = time.perf_counter()
            inner = sum(self.seconds.values())
            item = next(stream, None)
            elapsed = time.perf_counter() - start - (sum(self.seconds.values()) - inner)
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed
            if item is None:
                return
            yield item


class WeightSource(Protocol):
    """The weights of the trainer, as one rank contributes to sending them."""

    @property
    def owns_any(self) -> bool:
        """True if this rank has tensors to send."""
        ...

    @property
    def seconds(self) -> dict[str, float]:
        """The seconds of the last stream, by part: "gather" and "quantise"."""
        ...

    def stream_owned(self) -> NamedTensors:
        """Yield the tensors that this rank sends. A collective that all ranks must exhaust."""
        ...

    @property
    def unit_bytes(self) -> int:
        """The largest tensors that this rank knows and that travel in one bucket."""
        ...

    def stream_all(self) -> NamedTensors:
        """Yield all tensors on rank 0, and none elsewhere. A collective, as `stream_owned` is."""
        ...

    def stream_everywhere(self) -> NamedTensors:
        """Yield all tensors on every rank, in the same order. A collective, in step."""
        ...


class SoleSource:
    """Weights that one process has as a whole.

    open_stream: begins to iterate over them. owns_any: False on ranks that have none. unit_bytes:
    see `WeightSource`.
    """

    def __init__(
        self,
        open_stream: Callable[[], NamedTensors],
        *,
        owns_any: bool = True,
        unit_bytes: int = 0,
    ) -> None:
        self._open_stream = open_stream
        self._watch = StreamWatch()
        self.owns_any = owns_any
        self.unit_bytes = unit_bytes

    @property
    def seconds(self) -> dict[str, float]:
        """See `WeightSource`."""
        return self._watch.seconds

    def stream_owned(self) -> NamedTensors:
        """See `WeightSource`."""
        self._watch.seconds.clear()
        return self._watch.measure("gather", self._open_stream())

    def stream_all(self) -> NamedTensors:
        """See `WeightSource`."""
        return self._open_stream()

    def stream_everywhere(self) -> NamedTensors:
        """See `WeightSource`. There is no other rank."""
        return self.stream_owned()
