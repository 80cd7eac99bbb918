"""Metrics that reduce exactly over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch


class _Wire(msgspec.Struct):
    sums: dict[str, tuple[float, float]]
    maxima: dict[str, float]


@dataclass
class MetricSums:
    """sums[name] = [weighted sum, weight]; maxima[name] = largest value seen, NaN once one was.

    Tensors are summed where they are and moved to the host together, when something is asked for.
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    _pairs: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    _largest: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    def add(
        self, sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Add one micro-batch's tensors ([2] = sum, weight; and scalars), without waiting for their
        device.
        """
        for name, pair in sums.items():
            known, new = self._pairs.get(name), pair.detach().double()
            self._pairs[name] = new if known is None else known + new
        for name, value in (maxima or {}).items():
            known, new = self._largest.get(name), value.detach().double()
            self._largest[name] = new if known is None else torch.maximum(known, new)

    def add_mean(self, name: str, total: float, weight: float) -> None:
        old_total, old_weight = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_weight + weight)

    def _settle(self) -> None:
        """Move what was added as tensors to the host, in one transfer."""
        pairs, largest = self._pairs, self._largest
        self._pairs, self._largest = {}, {}
        if not pairs and not largest:
            return
        values = iter(
            torch.cat([*pairs.values(), *(value.view(1) for value in largest.values())]).tolist()
        )
        for name in pairs:
            self.add_mean(name, next(values), next(values))
        for name in largest:
            self._add_maximum(name, next(values))

    def _add_maximum(self, name: str, value: float) -> None:
        known = self.maxima.get(name, -math.inf)
        self.maxima[name] = value if value > known or math.isnan(value) else known

    def merge(self, others: Iterable[MetricSums]) -> MetricSums:
        """Everything of `self` and `others` together."""
        self._settle()
        merged = MetricSums(dict(self.sums), dict(self.maxima))
        for other in others:
            other._settle()
            for name, (total, weight) in other.sums.items():
                merged.add_mean(name, total, weight)
            for name, value in other.maxima.items():
                merged._add_maximum(name, value)
        return merged

    def values(self) -> dict[str, float]:
        """Means of what has weight, and maxima."""
        self._settle()
        means = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        return {**means, **self.maxima}

    def to_bytes(self) -> bytes:
        self._settle()
        return msgspec.msgpack.encode(_Wire(self.sums, self.maxima))

    @classmethod
    def from_bytes(cls, data: bytes) -> MetricSums:
        wire = msgspec.msgpack.decode(data, type=_Wire)
        return cls(wire.sums, wire.maxima)
