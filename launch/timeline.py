"""Show when a run sampled, trained and synced: a picture, and a trace for Perfetto.

Examples:

    python launch/timeline.py runs/NAME
    python launch/timeline.py runs/NAME --steps 3:8
    python launch/timeline.py runs/NAME --trace trace.json

The run may be finished, failed or running. It writes timeline.jsonl, unless logger.timeline=false.

Outputs: runs/NAME/timeline.png, or the file of --picture, and the file of --trace. A trace opens in
https://ui.perfetto.dev and at chrome://tracing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.past_run import RunUnreadable
from megatron_rl.records.timeline.layout import choose_steps
from megatron_rl.records.timeline.picture import draw_timeline
from megatron_rl.records.timeline.spans import TIMELINE_FILE, Span, read_timeline
from megatron_rl.records.timeline.trace import trace_events
from megatron_rl.records.write_errors import write_problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what was asked for and return the exit code."""
    options = parse_arguments(arguments)
    picture = options.picture or options.run / "timeline.png"
    try:
        spans = read_spans(options.run, options.steps)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    target = picture
    try:
        draw_timeline(spans, picture)
        print(picture)
        if options.trace is not None:
            target = options.trace
            options.trace.write_text(json.dumps(trace_events(spans)))
            print(options.trace)
    except OSError as error:
        problem = write_problem(error, target)
        if problem is None:
            raise
        print(problem, file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        prog="python launch/timeline.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, help="directory of a run")
    parser.add_argument(
        "--steps",
        type=step_range,
        metavar="FIRST:LAST",
        help="the steps to show, such as 3:8 (default: all)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG to write")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON file to write")
    return parser.parse_args(arguments)


def step_range(text: str) -> tuple[int, int]:
    """Parse a range of steps, both ends included."""
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIRST:LAST, such as 3:8") from None
    if not 0 <= first <= last:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 <= FIRST <= LAST")
    return first, last


def read_spans(run: Path, steps: tuple[int, int] | None) -> list[Span]:
    """Read the spans of some steps of a run, None: all of them. Raises `RunUnreadable`."""
    file = run / TIMELINE_FILE
    try:
        spans = list(read_timeline(file))
    except OSError as error:
        raise RunUnreadable(
            f"{file} cannot be read ({error}). Give the directory of a run with "
            "logger.timeline=true"
        ) from error
    if steps is not None:
        spans = choose_steps(spans, *steps)
    if not spans:
        missing_item = "span" if steps is None else f"step from {steps[0]} to {steps[1]}"
        raise RunUnreadable(f"{file} has no {missing_item}")
    return spans


if __name__ == "__main__":
    raise SystemExit(main())
