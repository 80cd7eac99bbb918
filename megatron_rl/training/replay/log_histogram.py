"""Quantiles over many ranks, from counts in bins of equal relative width that add up exactly."""

from __future__ import annotations

import math

import torch

# Bins cover the values from 2^-40 (9e-13) to 2^10 (1024), with 64 bins for each factor of 2.
_MIN_EXPONENT = -40
_MAX_EXPONENT = 10
_BINS_PER_OCTAVE = 64
# A share times a total may be slightly above the whole number that it stands for.
_ROUNDING = 1e-6
# Three further bins: values below the range, values above it, values that are not finite
BINS = (_MAX_EXPONENT - _MIN_EXPONENT) * _BINS_PER_OCTAVE + 3
RESOLUTION = 2 ** (0.5 / _BINS_PER_OCTAVE) - 1  # largest relative error of a quantile, 0.54 %


def log_counts(values: torch.Tensor) -> torch.Tensor:
    """Count how many |values| fall into each bin, int64 [BINS]. Does not wait for the device."""
    sizes = values.detach().float().abs().flatten()
    bins = ((sizes.log2() - _MIN_EXPONENT) * _BINS_PER_OCTAVE).floor().clamp(-1, BINS - 3) + 1
    bins = torch.where(sizes.isfinite(), bins, BINS - 1).to(torch.int64)
    counts = torch.zeros(BINS, dtype=torch.int64, device=sizes.device)
    return counts.scatter_add(0, bins, torch.ones_like(bins))


def quantile(counts: torch.Tensor, share: float) -> float:
    """Return the value that `share` of the counted values do not exceed, within `RESOLUTION`.

    Returns 0 below 9e-13, infinity above 1024, and NaN without values or if one was not finite.
    """
    total = int(counts.sum())
    if not total or int(counts[-1]):
        return float("nan")
    rank = max(1, math.ceil(share * total - _ROUNDING))
    place = int(torch.searchsorted(counts.cumsum(0), rank))
    if place == 0:
        return 0.0
    if place == BINS - 2:
        return float("inf")
    return 2.0 ** (_MIN_EXPONENT + (place - 0.5) / _BINS_PER_OCTAVE)
