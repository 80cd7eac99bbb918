"""Comparison of results where they are, a part at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK_ELEMENTS = 1 << 24
"""Elements that are compared at a time: the float64 copies of a pair take 256 MiB."""


def largest_difference(
    results: Sequence[torch.Tensor], references: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The largest |result - reference| of all pairs, a float64 scalar on the device of the results.

    NaN if a difference is NaN, 0 without elements. It copies nothing to the host, and needs memory
    for `CHUNK_ELEMENTS` elements alone. Raises ValueError for other numbers of tensors or elements.
    """
    largest = torch.zeros((), dtype=torch.float64, device=results[0].device)
    for result, reference in zip(results, references, strict=True):
        if result.numel() != reference.numel():
            raise ValueError(
                f"a result has shape {tuple(result.shape)}: must have as many elements as the "
                f"reference of shape {tuple(reference.shape)}"
            )
        chunks = zip(_chunks(result), _chunks(reference), strict=True)
        for mine, its_reference in chunks:
            difference = mine.double().sub_(its_reference).abs_()
            largest = torch.maximum(largest, difference.amax())
    return largest


def _chunks(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = tensor.detach().reshape(-1)
    return flat.split(CHUNK_ELEMENTS) if flat.numel() else ()
