"""Pads float32 products of few rows, whose sums MKL adds in an order of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_MIN_ROWS = 4
_MAX_ROWS = 16


def least_rows(width: int) -> int:
    """Return the rows from which on a row's result does not depend on the other rows.

    width: the number of products that a result adds up.

    On processors with AVX-512, MKL has an order of its own for up to three rows. On newer ones with
    AMX it has one for up to `width / 24` rows, at most 15. The returned number is above both.
    """
    return max(_MIN_ROWS, min(_MAX_ROWS, width // 16))


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Append zeros to rows [rows, width] that are fewer than `least_rows`. No row stays none."""
    missing = least_rows(x.shape[1]) - len(x)
    return F.pad(x, (0, 0, 0, missing)) if len(x) and missing > 0 else x
