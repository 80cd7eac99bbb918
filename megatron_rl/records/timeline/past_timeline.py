"""Reads the timeline of a run that may be finished, failed or running."""

from __future__ import annotations

from pathlib import Path

from megatron_rl.records.past_run import RunUnreadable
from megatron_rl.records.timeline.layout import choose_steps
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Span, read_timeline


def read_spans(run: Path, steps: tuple[int, int] | None) -> list[Span]:
    """Read the spans of some steps of a run, None: all of them. Raises `RunUnreadable`."""
    file = run / TIMELINE_FILE
    try:
        spans = list(read_timeline(file))
    except OSError as error:
        raise RunUnreadable(
            f"{file} cannot be read ({error}). Give the directory of a run"
        ) from error
    if steps is not None:
        spans = choose_steps(spans, *steps)
    if not spans:
        missing_item = "span" if steps is None else f"step from {steps[0]} to {steps[1]}"
        raise RunUnreadable(f"{file} has no {missing_item}")
    return spans
