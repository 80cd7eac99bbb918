"""Writes spans as trace events, which Perfetto and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_rl.records.timeline.layout import place_in_rows
from megatron_rl.records.timeline.spans import Lane, Span

_MICROSECONDS = 1e6


def trace_events(spans: Iterable[Span]) -> dict[str, Any]:
    """Return the trace. Its times begin with the first span. Spans of a row do not overlap."""
    spans = list(spans)
    origin = min((span.start for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for process, lane in enumerate(Lane):
        events.append(
            {"ph": "M", "name": "process_name", "pid": process, "args": {"name": lane.value}}
        )
        for row, span in place_in_rows([span for span in spans if span.lane is lane]):
            events.append(
                {
                    "ph": "X",
                    "name": span.name,
                    "pid": process,
                    "tid": row,
                    "ts": round((span.start - origin) * _MICROSECONDS),
                    "dur": round((span.end - span.start) * _MICROSECONDS),
                    "args": {"step": span.step, "tokens": span.tokens},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}
