"""Numbers of layers, over steps or experts, as matrices and as pictures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Metrics that are drawn by layer and step, and what they say; the experts' shares are drawn by
# layer and expert
BY_STEP = {
    "routes/disagreement": "share of rows where the live choice differs, layers before it replayed",
    "routes/live_disagreement": "share of rows where the live choice differs, layers before it live",
    "routes/load_imbalance": "largest share of an expert over the mean",
}
BY_EXPERT = "routes/load"
_SHARE = re.compile(rf"{BY_EXPERT}/layer_(\d+)/expert_(\d+)")
_CELL = 12  # pixels
# Viridis at equal distances, red green blue
_COLOURS = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64
)


@dataclass(frozen=True)
class HeatMap:
    """values float64 [layers, columns], NaN where a number is missing.

    layers: decoder layers, from 0.
    """

    name: str
    layers: list[int]
    columns: list[int]
    values: npt.NDArray[np.float64]

    def image(self) -> npt.NDArray[np.uint8]:
        """uint8 [3, height, width]: the smallest value dark, the largest bright, missing ones grey."""
        known = self.values[np.isfinite(self.values)]
        low, high = (known.min(), known.max()) if known.size else (0.0, 0.0)
        place = np.nan_to_num((self.values - low) / max(high - low, 1e-12)) * (len(_COLOURS) - 1)
        channels = [np.interp(place, np.arange(len(_COLOURS)), colours) for colours in _COLOURS.T]
        pixels = (
            np.where(np.isfinite(self.values), np.stack(channels), 128.0).round().astype(np.uint8)
        )
        return pixels.repeat(_CELL, axis=1).repeat(_CELL, axis=2)


def heat_maps(records: Iterable[Mapping[str, float | None]]) -> Iterator[HeatMap]:
    """The maps that records of `metrics.jsonl` hold: by step, and of the last measured step by
    expert.
    """
    by_step: dict[str, dict[int, dict[int, float]]] = {name: {} for name in BY_STEP}
    shares: dict[tuple[int, int], float] = {}
    for record in records:
        step, measured = int(record.get("step") or 0), dict[tuple[int, int], float]()
        for key, value in record.items():
            name, _, layer = key.rpartition("/layer_")
            number = float("nan") if value is None else value
            if name in by_step and layer.isdecimal():
                by_step[name].setdefault(step, {})[int(layer)] = number
            elif found := _SHARE.fullmatch(key):
                measured[int(found[1]), int(found[2])] = number
        shares = measured or shares
    for name, steps in by_step.items():
        if steps:
            yield _map(
                name,
                {
                    (layer, step): value
                    for step, row in steps.items()
                    for layer, value in row.items()
                },
            )
    if shares:
        yield _map(BY_EXPERT, shares)


def is_drawn(name: str) -> bool:
    """Whether a metric is part of a map."""
    return name.rpartition("/layer_")[0] in BY_STEP or is_share(name)


def is_share(name: str) -> bool:
    """Whether it is one expert's share of a layer: too many to be curves."""
    return _SHARE.fullmatch(name) is not None


def draw(heat_map: HeatMap, file: Path) -> None:
    """A PNG with axes and a scale."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    layers, columns = heat_map.values.shape
    figure, axes = plt.subplots(
        figsize=(3 + min(0.25 * columns, 12), 1.6 + min(0.25 * layers, 10)), dpi=150
    )
    drawn = axes.imshow(heat_map.values, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set_yticks(range(layers), [str(layer) for layer in heat_map.layers])
    every = max(1, columns // 12)
    axes.set_xticks(range(0, columns, every), [str(column) for column in heat_map.columns[::every]])
    axes.set_ylabel("decoder layer")
    axes.set_xlabel("expert" if heat_map.name == BY_EXPERT else "step")
    said = BY_STEP.get(
        heat_map.name, "share of a layer's rows that each expert got, in the last measured step"
    )
    axes.set_title(f"{heat_map.name}\n{said}", fontsize=8)
    figure.colorbar(drawn)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _map(name: str, cells: Mapping[tuple[int, int], float]) -> HeatMap:
    layers, columns = sorted({layer for layer, _ in cells}), sorted({column for _, column in cells})
    values = np.array(
        [[cells.get((layer, column), np.nan) for column in columns] for layer in layers]
    )
    return HeatMap(name, layers, columns, values)
