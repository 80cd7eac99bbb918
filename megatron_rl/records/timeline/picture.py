"""Draws a timeline: which step was sampled and trained when."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_rl.records.timeline.layout import sampled_steps
from megatron_rl.records.timeline.spans import Lane, Span

_SAMPLING = 3
_EVALUATION = 2
_TRAINING = 1
_OTHERS = 0
_HEIGHT = 0.36
_LABELS = {
    _SAMPLING: "sampling",
    _EVALUATION: "evaluation",
    _TRAINING: "training",
    _OTHERS: "sync, checkpoint",
}
# Of even and of odd steps
_STEP_COLOURS = ("#4477aa", "#99bbdd")
_EVALUATION_COLOUR = "#ccbb44"
_OTHER_COLOURS = {"sync": "#228833"}
_COMMAND_COLOUR = "#888888"
_MIN_LABEL_SHARE = 0.015  # of the width: a narrower bar has no room for a number


def draw_timeline(spans: Sequence[Span], file: Path) -> None:
    """Write a PNG. spans: at least one."""
    import matplotlib  # slow to import

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    origin = min(span.start for span in spans)
    width = max(span.end for span in spans) - origin
    figure, axes = plt.subplots(figsize=(11, 3.0), dpi=150)
    for step in sampled_steps(spans):
        _draw_step(axes, _SAMPLING, step.step, step.start - origin, step.end - origin, width)
    for span in spans:
        _draw_span(axes, span, origin, width)
    axes.set_yticks(list(_LABELS), list(_LABELS.values()))
    axes.set_ylim(-0.7, 3.7)
    axes.set_xlim(0, width)
    axes.set_xlabel("seconds; numbers are steps; green: weight sync, grey: other commands")
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)


def _draw_span(axes: Any, span: Span, origin: float, width: float) -> None:
    """Draw an evaluation's group, or a command. Groups of steps are drawn together."""
    start = span.start - origin
    end = span.end - origin
    if span.lane is Lane.ROLLOUTS:
        if span.step < 0:
            _draw_bar(axes, _EVALUATION, start, end, _EVALUATION_COLOUR)
    elif span.name == "train":
        _draw_step(axes, _TRAINING, span.step, start, end, width)
    else:
        colour = _OTHER_COLOURS.get(span.name, _COMMAND_COLOUR)
        _draw_bar(axes, _OTHERS, start, end, colour)


def _draw_step(axes: Any, lane: int, step: int, start: float, end: float, width: float) -> None:
    """Draw a bar with the number of its step. Steps that overlap take turns above and below."""
    shift = _HEIGHT / 2 if step % 2 else -_HEIGHT / 2
    _draw_bar(axes, lane + shift, start, end, _STEP_COLOURS[step % 2])
    if end - start > _MIN_LABEL_SHARE * width:
        axes.text((start + end) / 2, lane + shift, str(step), ha="center", va="center", fontsize=7)


def _draw_bar(axes: Any, height: float, start: float, end: float, colour: str) -> None:
    axes.barh(height, end - start, left=start, height=_HEIGHT, color=colour, linewidth=0)
