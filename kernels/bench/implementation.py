"""A benchmark case with the implementations that compete in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Run = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Implementation:
    """One competitor.

    run: computes once and returns its results, to be compared with the first implementation's.
    compare: False if the results are of another kind. note: what limits the comparison.
    """

    name: str
    run: Run
    compare: bool = True
    note: str = ""


@dataclass(frozen=True)
class Goal:
    """A bound for our implementation on a GPU. One of the two is None.

    most_us: microseconds of kernel time. least_of_copy: share of a copy's bandwidth.
    """

    most_us: float | None = None
    least_of_copy: float | None = None

    def __str__(self) -> str:
        if self.most_us is not None:
            return f"≤ {self.most_us:g} µs"
        return f"≥ {self.least_of_copy:.0%} of copy"

    def is_reached(self, seconds: float, share_of_copy: float) -> bool:
        """True if a measurement keeps the bound."""
        if self.most_us is not None:
            return seconds * 1e6 <= self.most_us
        return self.least_of_copy is not None and share_of_copy >= self.least_of_copy


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation on one input.

    implementations: ours first. Those that change the input come last. bytes_moved: read and
    written by a perfect implementation.

    input_bytes: size of the largest input, the unit of `extra peak / input`. absent: peers not
    measured, with reasons. goal: of our implementation on a GPU.
    """

    operation: str
    part: str
    shape: str
    dtype: str
    bytes_moved: int
    input_bytes: int
    implementations: tuple[Implementation, ...]
    absent: dict[str, str] = field(default_factory=dict)
    goal: Goal | None = None

    @property
    def title(self) -> str:
        """Operation, part and dtype."""
        return f"{self.operation} {self.part} {self.dtype}"
