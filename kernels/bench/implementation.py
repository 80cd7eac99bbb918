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
class BenchmarkCase:
    """One operation on one input.

    implementations: ours first. bytes_moved: read and written by a perfect implementation.

    input_bytes: size of the largest input, the unit of `extra peak / input`. absent: peers not
    measured, with reasons.
    """

    operation: str
    part: str
    shape: str
    dtype: str
    bytes_moved: int
    input_bytes: int
    implementations: tuple[Implementation, ...]
    absent: dict[str, str] = field(default_factory=dict)
