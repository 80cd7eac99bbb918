"""Arranges per-layer metrics as heat maps: layers by steps, or layers by experts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Cells = dict[tuple[int, int], float]

# The metrics with one heat map over layers and steps each, with their meaning
BY_STEP = {
    "routes/disagreement": "share of rows whose live routes differ, earlier layers replayed",
    "routes/live_disagreement": "share of rows whose live routes differ, earlier layers live",
    "routes/load_imbalance": "largest share of an expert, divided by the mean",
}
# The metric with one heat map over layers and experts
BY_EXPERT = "routes/load"
_BY_EXPERT_MEANING = "share of a layer's rows for each expert, in the last measured step"
_EXPERT_SHARE = re.compile(rf"{BY_EXPERT}/layer_(\d+)/expert_(\d+)")
_CELL_PIXELS = 12
_MISSING_GREY = 128.0
# Viridis at equal distances, as red, green, blue
_COLOURS = np.array(
    [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], dtype=np.float64
)


@dataclass(frozen=True)
class HeatMap:
    """One heat map.

    values: float64 [layers, columns], NaN where a number is missing. layers: the indices of the
    decoder layers, from 0. columns: steps, or the indices of experts.
    """

    name: str
    layers: list[int]
    columns: list[int]
    values: npt.NDArray[np.float64]

    def image(self) -> npt.NDArray[np.uint8]:
        """The pixels as uint8 [3, height, width]. Small values are dark, missing ones grey."""
        is_present = np.isfinite(self.values)
        low = 0.0
        high = 0.0
        if is_present.any():
            low = float(self.values[is_present].min())
            high = float(self.values[is_present].max())
        share = np.nan_to_num((self.values - low) / max(high - low, 1e-12))
        position = share * (len(_COLOURS) - 1)
        channels = [
            np.interp(position, np.arange(len(_COLOURS)), intensities) for intensities in _COLOURS.T
        ]
        colours = np.where(is_present, np.stack(channels), _MISSING_GREY)
        pixels = colours.round().astype(np.uint8)
        return pixels.repeat(_CELL_PIXELS, axis=1).repeat(_CELL_PIXELS, axis=2)


def heat_maps(records: Iterable[Mapping[str, float | None]]) -> Iterator[HeatMap]:
    """The heat maps of the records of a metrics.jsonl.

    The heat map over experts shows the last measured step.
    """
    by_step: dict[str, Cells] = {name: {} for name in BY_STEP}
    by_expert: Cells = {}
    for record in records:
        _add_step(record, by_step)
        by_expert = _expert_shares(record) or by_expert
    for name, cells in by_step.items():
        if cells:
            yield _heat_map(name, cells)
    if by_expert:
        yield _heat_map(BY_EXPERT, by_expert)


def is_heat_map_metric(name: str) -> bool:
    """True for a metric that is part of a heat map."""
    return name.rpartition("/layer_")[0] in BY_STEP or is_expert_share(name)


def is_expert_share(name: str) -> bool:
    """True for one expert's share of a layer. There are too many of them for curves."""
    return _EXPERT_SHARE.fullmatch(name) is not None


def draw(heat_map: HeatMap, file: Path) -> None:
    """Write a heat map as PNG, with axes and a scale."""
    # This import is slow
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num_layers, num_columns = heat_map.values.shape
    width = 3 + min(0.25 * num_columns, 12)
    height = 1.6 + min(0.25 * num_layers, 10)
    figure, axes = plt.subplots(figsize=(width, height), dpi=150)
    image = axes.imshow(heat_map.values, aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set_yticks(range(num_layers), [str(layer) for layer in heat_map.layers])
    interval = max(1, num_columns // 12)
    labels = [str(column) for column in heat_map.columns[::interval]]
    axes.set_xticks(range(0, num_columns, interval), labels)
    axes.set_ylabel("decoder layer")
    axes.set_xlabel("expert" if heat_map.name == BY_EXPERT else "step")
    meaning = BY_STEP.get(heat_map.name, _BY_EXPERT_MEANING)
    axes.set_title(f"{heat_map.name}\n{meaning}", fontsize=8)
    figure.colorbar(image)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _add_step(record: Mapping[str, float | None], by_step: dict[str, Cells]) -> None:
    """Add the numbers of one record to the heat maps over steps, by (layer, step)."""
    step = int(record.get("step") or 0)
    for key, value in record.items():
        name, _, layer = key.rpartition("/layer_")
        if name in by_step and layer.isdecimal():
            by_step[name][int(layer), step] = math.nan if value is None else value


def _expert_shares(record: Mapping[str, float | None]) -> Cells:
    """The experts' shares in one record, by (layer, expert)."""
    shares: Cells = {}
    for key, value in record.items():
        match = _EXPERT_SHARE.fullmatch(key)
        if match:
            shares[int(match[1]), int(match[2])] = math.nan if value is None else value
    return shares


def _heat_map(name: str, cells: Cells) -> HeatMap:
    """cells: values by (layer, column)."""
    layers = sorted({layer for layer, _ in cells})
    columns = sorted({column for _, column in cells})
    values = np.full((len(layers), len(columns)), np.nan)
    for row, layer in enumerate(layers):
        for place, column in enumerate(columns):
            values[row, place] = cells.get((layer, column), np.nan)
    return HeatMap(name, layers, columns, values)
