"""Plots written to PNG files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any


@contextlib.contextmanager
def drawing(file: Path, panels: int = 1) -> Iterator[list[Any]]:
    """Panels one above the other with the same horizontal axis, written to `file` at the end of the
    block.
    """
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    size = (7, 4.2) if panels == 1 else (7, 0.6 + 2.6 * panels)
    figure, made = plt.subplots(panels, figsize=size, dpi=150, sharex=True, squeeze=False)
    yield list(made[:, 0])
    for axes in made[:, 0]:
        axes.grid(alpha=0.3)
    made[0, 0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def draw_range(
    axes: Any, curves: Sequence[Sequence[tuple[float, float]]], *, index: int, label: str
) -> None:
    """The mean of curves, each a list of (x, y), with their range, to the end of the shortest.

    index: of the colour.
    """
    rows = list(zip(*curves, strict=False))
    values = [[y for _, y in row] for row in rows]
    places = [mean(x for x, _ in row) for row in rows]
    axes.plot(
        places, list(map(mean, values)), color=f"C{index}", marker="o", markersize=3, label=label
    )
    low, high = list(map(min, values)), list(map(max, values))
    axes.fill_between(places, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
