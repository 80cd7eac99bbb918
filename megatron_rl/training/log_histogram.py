"""Quantiles over many ranks: counts in bins of equal relative width, which add up exactly."""

from __future__ import annotations

import math

import torch

_LOWEST, _HIGHEST, _PER_OCTAVE = -40, 10, 64  # 9e-13 to 1024
_ROUNDING = 1e-6  # of a share times a total that is a whole number
BINS = (_HIGHEST - _LOWEST) * _PER_OCTAVE + 3  # below, above, not finite
RESOLUTION = 2 ** (0.5 / _PER_OCTAVE) - 1  # 0.54 %: how far a quantile may be from the value itself


def log_counts(values: torch.Tensor) -> torch.Tensor:
    """int64 [BINS]: how many of |values| fall into each bin. Waits for no device."""
    size = values.detach().float().abs().flatten()
    place = ((size.log2() - _LOWEST) * _PER_OCTAVE).floor().clamp(-1, BINS - 3) + 1
    place = torch.where(size.isfinite(), place, BINS - 1).to(torch.int64)
    return torch.zeros(BINS, dtype=torch.int64, device=size.device).scatter_add(
        0, place, torch.ones_like(place)
    )


def quantile(counts: torch.Tensor, share: float) -> float:
    """The value that `share` of the counted do not exceed, within `RESOLUTION`; 0 below 9e-13.

    NaN with nothing counted, and where one was not finite; infinite above 1024.
    """
    total = int(counts.sum())
    if not total or int(counts[-1]):
        return float("nan")
    place = int(torch.searchsorted(counts.cumsum(0), max(1, math.ceil(share * total - _ROUNDING))))
    if place == 0:
        return 0.0
    if place == BINS - 2:
        return float("inf")
    return 2.0 ** (_LOWEST + (place - 0.5) / _PER_OCTAVE)
