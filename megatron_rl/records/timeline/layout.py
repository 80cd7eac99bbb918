"""Arranges the spans of a timeline in rows that do not overlap."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_rl.records.timeline.spans import Lane, Span


@dataclass(frozen=True)
class StepSpan:
    """The time from the first request of a step until its last group arrived."""

    step: int
    start: float
    end: float


def choose_steps(spans: Iterable[Span], first: int, last: int) -> list[Span]:
    """Return the spans between the first request and the last command of some steps."""
    spans = list(spans)
    spans_of_steps = [span for span in spans if first <= span.step <= last]
    if not spans_of_steps:
        return []
    start = min(span.start for span in spans_of_steps)
    end = max(span.end for span in spans_of_steps)
    return [span for span in spans if span.end > start and span.start < end]


def sampled_steps(spans: Iterable[Span]) -> list[StepSpan]:
    """Return when the rollouts of each step were sampled, in the order of steps."""
    starts: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in spans:
        if span.lane is Lane.ROLLOUTS and span.step >= 0:
            starts[span.step] = min(starts.get(span.step, span.start), span.start)
            ends[span.step] = max(ends.get(span.step, span.end), span.end)
    return [StepSpan(step, starts[step], ends[step]) for step in sorted(starts)]


def place_in_rows(spans: Sequence[Span]) -> list[tuple[int, Span]]:
    """Return each span, by its start, with the first row in which nothing overlaps it."""
    row_ends: list[float] = []
    placements: list[tuple[int, Span]] = []
    for span in sorted(spans, key=lambda span: (span.start, span.end)):
        free_rows = (row for row, end in enumerate(row_ends) if end <= span.start)
        row = next(free_rows, len(row_ends))
        if row == len(row_ends):
            row_ends.append(span.end)
        row_ends[row] = span.end
        placements.append((row, span))
    return placements
