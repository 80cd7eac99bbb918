"""Arranges per-layer metrics as heat maps: layers by steps, or layers by experts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

# Values by (layer, expert)
Cells = dict[tuple[int, int], float]
# The values of each layer by step
_Columns = dict[int, dict[int, float]]

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
_MAX_CELL_PIXELS = 12
_MIN_CELL_PIXELS = 2
_WIDTH_PIXELS = 768
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

    @property
    def limits(self) -> tuple[float, float]:
        """The values of the darkest and of the brightest colour, which differ.

        The scale of equal values begins with 0. That of zeros ends with 1.
        """
        present_values = self.values[np.isfinite(self.values)]
        if not present_values.size:
            return 0.0, 1.0
        low = float(present_values.min())
        high = float(present_values.max())
        if low < high:
            return low, high
        return (0.0, high) if high > 0 else (low, low + 1.0)

    def image(self) -> npt.NDArray[np.uint8]:
        """The pixels as uint8 [3, height, width]. Small values are dark, missing ones grey."""
        is_present = np.isfinite(self.values)
        low, high = self.limits
        share = np.nan_to_num((self.values - low) / (high - low))
        position = share * (len(_COLOURS) - 1)
        channels = [
            np.interp(position, np.arange(len(_COLOURS)), intensities) for intensities in _COLOURS.T
        ]
        colours = np.where(is_present, np.stack(channels), _MISSING_GREY)
        pixels = colours.round().astype(np.uint8)
        cell_pixels = min(_WIDTH_PIXELS // max(1, len(self.columns)), _MAX_CELL_PIXELS)
        cell_pixels = max(cell_pixels, _MIN_CELL_PIXELS)
        return pixels.repeat(cell_pixels, axis=1).repeat(cell_pixels, axis=2)


class HeatMaps:
    """The heat maps of a run, to which one record after the other is added.

    The heat map over experts shows the last measured step.

    max_columns: the largest number of steps in a heat map, besides the last step. If there are
    more, every other step is omitted. None: all steps are shown.
    """

    def __init__(self, max_columns: int | None = None) -> None:
        self._max_columns = max_columns
        self._by_step: dict[str, _Columns] = {name: {} for name in BY_STEP}
        self._intervals = dict.fromkeys(BY_STEP, 1)
        self._num_measured = dict.fromkeys(BY_STEP, 0)
        self._last_columns: dict[str, tuple[int, dict[int, float]]] = {}
        self._by_expert: Cells = {}

    def add(self, record: Mapping[str, float | None]) -> None:
        """Add the numbers of one record of a metrics.jsonl."""
        step = int(record.get("step") or 0)
        for name, values in _layer_values(record).items():
            self._add_column(name, step, values)
        self._by_expert = _expert_shares(record) or self._by_expert

    def maps(self) -> Iterator[HeatMap]:
        """Yield the heat maps that have a value."""
        for name, columns in self._by_step.items():
            if columns:
                yield _step_map(name, columns | dict([self._last_columns[name]]))
        if self._by_expert:
            yield _expert_map(self._by_expert)

    def _add_column(self, name: str, step: int, values: dict[int, float]) -> None:
        self._last_columns[name] = (step, values)
        columns = self._by_step[name]
        if self._num_measured[name] % self._intervals[name] == 0:
            columns[step] = values
        self._num_measured[name] += 1
        if self._max_columns is not None and len(columns) > self._max_columns:
            self._intervals[name] *= 2
            self._by_step[name] = dict(list(columns.items())[::2])


def heat_maps(records: Iterable[Mapping[str, float | None]]) -> Iterator[HeatMap]:
    """The heat maps of the records of a metrics.jsonl, with every measured step."""
    maps = HeatMaps()
    for record in records:
        maps.add(record)
    return maps.maps()


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
    low, high = heat_map.limits
    image = axes.imshow(
        heat_map.values,
        aspect="auto",
        interpolation="nearest",
        cmap="viridis",
        vmin=low,
        vmax=high,
    )
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


def _layer_values(record: Mapping[str, float | None]) -> dict[str, dict[int, float]]:
    """The numbers of one record that belong to heat maps over steps, by map and layer."""
    values_by_name: dict[str, dict[int, float]] = {}
    for key, value in record.items():
        name, _, layer = key.rpartition("/layer_")
        if name in BY_STEP and layer.isdecimal():
            values = values_by_name.setdefault(name, {})
            values[int(layer)] = math.nan if value is None else value
    return values_by_name


def _expert_shares(record: Mapping[str, float | None]) -> Cells:
    """The experts' shares in one record, by (layer, expert)."""
    shares: Cells = {}
    for key, value in record.items():
        match = _EXPERT_SHARE.fullmatch(key)
        if match:
            shares[int(match[1]), int(match[2])] = math.nan if value is None else value
    return shares


def _step_map(name: str, columns: _Columns) -> HeatMap:
    layers = sorted({layer for values in columns.values() for layer in values})
    steps = sorted(columns)
    rows = [[columns[step].get(layer, math.nan) for step in steps] for layer in layers]
    return HeatMap(name, layers, steps, np.array(rows, np.float64))


def _expert_map(shares: Cells) -> HeatMap:
    layers = sorted({layer for layer, _ in shares})
    experts = sorted({expert for _, expert in shares})
    rows = [[shares.get((layer, expert), math.nan) for expert in experts] for layer in layers]
    return HeatMap(BY_EXPERT, layers, experts, np.array(rows, np.float64))
