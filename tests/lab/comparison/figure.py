"""Plots in PNG files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any


@contextlib.contextmanager
def drawing(file: Path, panels: int = 1, *, share_x: bool = True) -> Iterator[list[Any]]:
    """Panels above each other, written to `file` at the end. share_x: they have one axis below."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (7, 4.2) if panels == 1 else (7, 0.6 + 2.6 * panels)
    figure, grid = plt.subplots(panels, figsize=size, dpi=150, sharex=share_x, squeeze=False)
    yield list(grid[:, 0])
    for axes in grid[:, 0]:
        axes.grid(alpha=0.3)
    grid[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def draw_range(
    axes: Any, curves: Sequence[Sequence[tuple[float, float]]], *, index: int, label: str
) -> None:
    """Draw the mean and the range of curves, up to the end of the shortest.

    curves: each a list of (x, y). index: index of the colour.
    """
    rows = list(zip(*curves, strict=False))
    values = [[y for _, y in row] for row in rows]
    positions = [mean(x for x, _ in row) for row in rows]
    means = list(map(mean, values))
    low = list(map(min, values))
    high = list(map(max, values))
    axes.plot(positions, means, color=f"C{index}", marker="o", markersize=3, label=label)
    axes.fill_between(positions, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
