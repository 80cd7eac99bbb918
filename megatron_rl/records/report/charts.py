"""Draws charts as SVG text for a page in light and dark colours.

Text and axes have the colour of the page's text, and all else has colours that the page names. The
charts are as wide as their place.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron_rl.records.heat_maps import HeatMap

# Okabe and Ito's colours, which people with colour blindness can tell apart, and two more
COLOURS = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8a6d3b",
    "#7f7f7f",
    "#7b5ab8",
    "#8f9200",
)
# The same colours on a dark background
DARK_COLOURS = (
    "#4da3e8",
    "#ff8f4a",
    "#33c79a",
    "#e39ac4",
    "#f0b73d",
    "#9bdcff",
    "#cfa96b",
    "#a9afb8",
    "#b79df0",
    "#c9cc45",
)
_INK = "#123456"  # stands for the colour of the page's text
_SIZE_INCHES = (4.2, 2.5)
_ROW_INCHES = 0.24
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 8.0,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "text.color": _INK,
    "text.parse_math": False,  # names may contain $
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
_XML_HEADER = re.compile(r"^.*?(?=<svg)", re.DOTALL)
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_IDENTIFIER = re.compile(r'(id="|url\(#|href="#)')


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    half_widths: of an interval around each value, None without intervals.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    half_widths: Sequence[float] | None = None
    colour: str = COLOURS[0]


@dataclass(frozen=True)
class Chart:
    """A chart with its caption.

    note: a sentence below the chart, "" for none.
    """

    title: str
    svg: str
    note: str = ""


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str = "step",
    note: str = "",
    from_zero: bool = False,
) -> Chart:
    """Draw lines, with their intervals as bands.

    from_zero: whether the axis begins at 0, so that small changes of a value look small.
    """
    with _figure(title) as (figure, axes, chart):
        for line in lines:
            marker = "o" if len(line.x) < 30 else None
            axes.plot(
                line.x, line.y, color=line.colour, label=line.label, lw=1.4, ms=3, marker=marker
            )
            if line.half_widths is not None:
                low = np.subtract(line.y, line.half_widths)
                high = np.add(line.y, line.half_widths)
                axes.fill_between(line.x, low, high, color=line.colour, alpha=0.2, lw=0)
        axes.set_xlabel(x_label)
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True, nbins=7))
        axes.xaxis.set_major_formatter(mpl.ticker.EngFormatter(sep=""))
        _limit_axis(axes, lines, from_zero=from_zero)
        axes.grid(color=_INK, alpha=0.12)
        if len({line.label for line in lines}) > 1:
            axes.legend(fontsize=7)
    return Chart(title, chart(figure), note)


def _limit_axis(axes: Axes, lines: Sequence[Line], *, from_zero: bool) -> None:
    if not any(any(line.y) for line in lines):
        axes.set_ylim(-0.05, 1.0)  # otherwise the axis of zeros has negative numbers
        axes.set_yticks([0], ["0"])
    elif from_zero:
        axes.set_ylim(0.0, 1.15 * axes.get_ylim()[1])
        axes.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%.2g"))


def stacked_bars(
    title: str,
    x: Sequence[float],
    layers: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    *,
    note: str = "",
) -> Chart:
    """Draw layers on top of each other at each x. colours: by layer."""
    with _figure(title) as (figure, axes, chart):
        bottom = np.zeros(len(x))
        width = 0.9 * min(np.diff(x), default=1.0)
        for label, values in layers.items():
            axes.bar(x, values, width, bottom, color=colours[label], label=label)
            bottom += np.asarray(values)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(mpl.ticker.MaxNLocator(integer=True, nbins=7))
        figure.legend(fontsize=7, ncols=4, loc="outside upper center")
    return Chart(title, chart(figure), note)


def bars(title: str, values: Mapping[str, float], *, unit: str, note: str = "") -> Chart:
    """Draw one horizontal bar for each value, with its number."""
    height = max(1.2, 0.5 + _ROW_INCHES * len(values))
    with _figure(title, height) as (figure, axes, chart):
        labels = list(values)
        numbers = list(values.values())
        rows = range(len(labels))
        axes.barh(rows, numbers, color=[_colour(index) for index in rows])
        for row, number in zip(rows, numbers, strict=True):
            axes.text(number, row, f"\u00a0{number:,.0f}", va="center", fontsize=7)
        axes.set_yticks(rows, labels)
        axes.invert_yaxis()
        axes.margins(x=0.22)
        axes.set_xlabel(unit)
        axes.xaxis.set_major_formatter(mpl.ticker.EngFormatter())
    return Chart(title, chart(figure), note)


def waterfall(title: str, total: float, parts: Mapping[str, float], *, note: str = "") -> Chart:
    """Draw how a total falls apart: each bar begins where the one before ends."""
    height = max(1.4, 0.6 + _ROW_INCHES * (len(parts) + 1))
    with _figure(title, height) as (figure, axes, chart):
        labels = ["sampled", *parts]
        rows = range(len(labels))
        sizes = [total, *parts.values()]
        starts = [0.0, *(total - np.cumsum(list(parts.values()))).tolist()]
        axes.barh(rows, sizes, left=starts, color=[_colour(min(index, 1)) for index in rows])
        for row, size, start in zip(rows, sizes, starts, strict=True):
            share = size / total if total else 0.0
            axes.text(start + size, row, f"\u00a0{share:.1%}", va="center", fontsize=7)
        axes.set_yticks(rows, labels)
        axes.invert_yaxis()
        axes.margins(x=0.18)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(mpl.ticker.EngFormatter())
    return Chart(title, chart(figure), note)


def timeline(
    title: str,
    rows: Mapping[str, Sequence[tuple[float, float]]],
    colours: Mapping[str, str],
    *,
    note: str = "",
) -> Chart:
    """Draw spans of time. rows: (start, duration) in seconds by name. colours: by name."""
    height = max(1.2, 0.6 + _ROW_INCHES * len(rows))
    with _figure(title, height) as (figure, axes, chart):
        for row, (name, spans) in enumerate(rows.items()):
            axes.broken_barh(list(spans), (row - 0.4, 0.8), facecolors=colours[name])
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlabel("seconds of steps, evaluations and checkpoints")
    return Chart(title, chart(figure), note)


def heat_map(title: str, values: HeatMap, *, x_label: str, note: str = "") -> Chart:
    """Draw layers by columns. Missing values have no colour."""
    with _figure(title) as (figure, axes, chart):
        low, high = values.limits
        image = axes.imshow(
            np.ma.masked_invalid(values.values),
            aspect="auto",
            interpolation="nearest",
            vmin=low,
            vmax=high,
        )
        axes.set_yticks(*_ticks(values.layers))
        axes.set_xticks(*_ticks(values.columns))
        axes.set_xlabel(x_label)
        axes.set_ylabel("layer")
        figure.colorbar(image, ax=axes)
    return Chart(title, chart(figure), note)


def _ticks(names: Sequence[int]) -> tuple[list[int], list[str]]:
    places: npt.NDArray[np.int64] = np.unique(np.linspace(0, len(names) - 1, 8).astype(np.int64))
    return places.tolist(), [str(names[place]) for place in places]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def page_colour(colour: str) -> str:
    """Return the name that one of `COLOURS` has in the style of the page, which may be dark."""
    return f"var(--chart-{COLOURS.index(colour)})"


@contextmanager
def _figure(title: str, height: float = _SIZE_INCHES[1]) -> Iterator[tuple[Figure, Axes, Any]]:
    """Make a figure with one pair of axes, and the function that turns it into SVG."""
    style = {**_STYLE, "svg.hashsalt": title}

    def chart(drawn_figure: Figure) -> str:
        with mpl.rc_context(style):  # it decides how text is written
            return _to_svg(drawn_figure, title)

    with mpl.rc_context(style):
        figure = Figure(figsize=(_SIZE_INCHES[0], height))
        axes = figure.subplots()
        yield figure, axes, chart


def _to_svg(figure: Figure, title: str) -> str:
    """Return the SVG element. Its identifiers begin with the title, to be unique on the page."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = _METADATA.sub("", _XML_HEADER.sub("", file.getvalue()))
    prefix = re.sub(r"\W", "_", title)
    svg = _IDENTIFIER.sub(rf"\1{prefix}-", svg).replace(_INK, "currentColor")
    for colour in COLOURS:
        svg = svg.replace(colour, page_colour(colour))
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{_escape(title)}"', 1)


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
