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
    """Weighted means and maxima.

    Tensors are added up on their device and moved to the host together, when a result is needed.

    sums: (weighted sum, weight) by name.
    maxima: largest value by name, NaN if one of the values was NaN.
    """

    sums: dict[str, tuple[float, float]] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    _device_sums: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, init=False)
    _device_maxima: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, init=False)

    def add(
        self, sums: Mapping[str, torch.Tensor], maxima: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        """Add the tensors of one micro-batch without waiting for their device.

        sums: [2] tensors, (weighted sum, weight).
        maxima: scalars.
        """
        for name, pair in sums.items():
            addend = pair.detach().double()
            if name in self._device_sums:
                addend = self._device_sums[name] + addend
            self._device_sums[name] = addend
        for name, value in (maxima or {}).items():
            maximum = value.detach().double()
            if name in self._device_maxima:
                maximum = torch.maximum(self._device_maxima[name], maximum)
            self._device_maxima[name] = maximum

    def add_mean(self, name: str, total: float, weight: float) -> None:
        """Add a weighted sum and its weight."""
        old_total, old_weight = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + total, old_weight + weight)

    def merge(self, others: Iterable[MetricSums]) -> MetricSums:
        """Return the metrics of `self` and `others` together."""
        self._move_to_host()
        result = MetricSums(dict(self.sums), dict(self.maxima))
        for other in others:
            other._move_to_host()
            for name, (total, weight) in other.sums.items():
                result.add_mean(name, total, weight)
            for name, value in other.maxima.items():
                result._add_maximum(name, value)
        return result

    def values(self) -> dict[str, float]:
        """Return the means with a weight other than 0, and the maxima."""
        self._move_to_host()
        means = {name: total / weight for name, (total, weight) in self.sums.items() if weight}
        return {**means, **self.maxima}

    def to_bytes(self) -> bytes:
        """Encode the metrics."""
        self._move_to_host()
        return msgspec.msgpack.encode(_Wire(self.sums, self.maxima))

    @classmethod
    def from_bytes(cls, data: bytes) -> MetricSums:
        """Decode the bytes of `to_bytes`."""
        wire = msgspec.msgpack.decode(data, type=_Wire)
        return cls(wire.sums, wire.maxima)

    def _add_maximum(self, name: str, value: float) -> None:
        maximum = self.maxima.get(name, -math.inf)
        self.maxima[name] = value if value > maximum or math.isnan(value) else maximum

    def _move_to_host(self) -> None:
        """Move the tensors that were added to the host, in one transfer."""
        pairs = self._device_sums
        maxima = self._device_maxima
        self._device_sums = {}
        self._device_maxima = {}
        if not pairs and not maxima:
            return
        tensors = [*pairs.values(), *(value.view(1) for value in maxima.values())]
        values = iter(torch.cat(tensors).tolist())
        for name in pairs:
            self.add_mean(name, next(values), next(values))
        for name in maxima:
            self._add_maximum(name, next(values))
