"""Metrics that reduce exactly over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec
import torch


class _Wire(msgspec.Struct):
    sums: dict[str, tuple[float, float]]
    maxima: dict[str, float]


@dataclass
class MetricSums:
    """sums[name] = [weighted sum, weight]; maxima[name] = largest value seen."""

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor] | None = None) -> None:
        """Add one micro-batch's tensors ([2] = sum, weight; and scalars). Moves them to the host."""
        for name, pair in sums.items():
            total, weight = pair.tolist()
            self.add_mean(name, total, weight)
        for name, value in (maxima or {}).items():
            self.maxima[name] = max(self.maxima.get(name, -float("inf")), float(value))

    def add_mean(self, name: str, total: float, weight: float) -> None:
        old_total, old_weight = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_weight + weight)

    def merge(self, others: Iterable[MetricSums]) -> MetricSums:
        """Everything of `self` and `others` together."""
        merged = MetricSums(dict(self.sums), dict(self.maxima))
        for other in others:
            for name, (total, weight) in other.sums.items():
                merged.add_mean(name, total, weight)
            for name, value in other.maxima.items():
                merged.maxima[name] = max(merged.maxima.get(name, -float("inf")), value)
        return merged

    def values(self) -> dict[str, float]:
        """Means of what has weight, and maxima."""
        means = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        return {**means, **self.maxima}

    def to_bytes(self) -> bytes:
        return msgspec.msgpack.encode(_Wire(self.sums, self.maxima))

    @classmethod
    def from_bytes(cls, data: bytes) -> MetricSums:
        wire = msgspec.msgpack.decode(data, type=_Wire)
        return cls(wire.sums, wire.maxima)
