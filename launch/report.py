"""Report what one or several runs reached: a page, the samples, the time of a step, the routes.

Examples:

    python launch/report.py runs/NAME
    python launch/report.py runs/A runs/B --out comparison.html
    python launch/report.py samples runs/NAME --follow
    python launch/report.py timeline runs/NAME
    python launch/report.py steps runs/NAME
    python launch/report.py heat-maps runs/NAME

Outputs: without a command, one HTML page with curves, token account, times, faults and samples.
`samples` prints what the model says. `timeline` draws when the run sampled, trained and synced.
`steps` prints a Markdown table of seconds by section of a step. `heat-maps` writes
runs/NAME/heat_maps/*.png and prints their names; the run needs train.replay_measure_every. The
runs may be finished or running.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.interrupts import exit_on_interrupt
from megatron_rl.records.heat_maps import draw, heat_maps
from megatron_rl.records.past_run import RunUnreadable, read_metrics
from megatron_rl.records.report.step_times import report_steps
from megatron_rl.records.samples.sample import ALL_KINDS, SampleKind
from megatron_rl.records.timeline.past_timeline import read_spans
from megatron_rl.records.timeline.picture import draw_timeline
from megatron_rl.records.timeline.trace import trace_events
from megatron_rl.records.write_errors import write_problem

_PAGE = "page"
_PAGE_NAME = "report.html"
_PAGE_DESCRIPTION = """Write one HTML page about one or several runs, in the same charts.

    python launch/report.py runs/NAME
    python launch/report.py runs/A runs/B --out comparison.html

Output: RUN/report.html, or report.html for several runs. It needs no network and no other file.
"""
_SAMPLES = """Show what the model of a run says: the shortest, the longest and the surest incorrect
response.

    python launch/report.py samples runs/NAME
    python launch/report.py samples runs/NAME --follow
    python launch/report.py samples runs/NAME --step 10 --kind most-clipped
    python launch/report.py samples runs/NAME --step 10 --kind all --json

It shows samples of the newest step that keeps some (samples.every), unless --step names another.
docs/samples.md describes the files.

Outputs: texts for a terminal of 80 columns or more, or one JSON object a line. Control characters
that the model wrote are shown as escapes.
"""
_TIMELINE = """Show when a run sampled, trained and synced: a picture, and a trace for Perfetto.

    python launch/report.py timeline runs/NAME
    python launch/report.py timeline runs/NAME --steps 3:8
    python launch/report.py timeline runs/NAME --trace trace.json

The run writes timeline.jsonl for this.

Outputs: runs/NAME/timeline.png, or the file of --picture, and the file of --trace. A trace opens in
https://ui.perfetto.dev and at chrome://tracing.
"""
_STEPS = """Print the seconds of each section of a step: of the first step, which compiles, and the
mean of all later steps.

    python launch/report.py steps runs/NAME

Output: a Markdown table. "other" is the time of a step in no section. The lines below it are the
seconds of all steps, evaluations and checkpoints.
"""
_HEAT_MAPS = """Draw what a run measured of its expert routes, layer by layer.

    python launch/report.py heat-maps runs/NAME

Outputs: runs/NAME/heat_maps/*.png, whose names are printed. Train with
train.replay_measure_every=10 to have such measurements.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    options = parse_arguments(arguments)
    try:
        options.command(options)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python must not write the rest at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        problem = write_problem(error, options.target)
        if problem is None:
            raise
        print(problem, file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] not in (*_COMMANDS, "-h", "--help"):
        words.insert(0, _PAGE)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    names = f"{{{','.join(_COMMANDS)}}}"
    commands = parser.add_subparsers(required=True, metavar=names)
    for name, (summary, description, add_options, run) in _COMMANDS.items():
        command = commands.add_parser(
            name,
            help=summary,
            description=description,
            formatter_class=raw,
            allow_abbrev=False,
        )
        add_options(command)
        command.set_defaults(command=run, target=None)
    return parser.parse_args(words)


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="directory of a run, such as runs/NAME"
    )


def _add_page_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="directory of a run, such as runs/NAME"
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the page, instead of RUN/report.html"
    )


def _add_samples_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--follow", "-f", action="store_true", help="wait for new samples until the run ends"
    )
    parser.add_argument("--step", type=int, metavar="N", help="show this step")
    parser.add_argument(
        "--kind",
        choices=[*map(str, SampleKind), ALL_KINDS],
        help="show one kind, or all kept responses (default: the first three kinds)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--full", action="store_true", help="print long texts without a gap")


def _add_timeline_options(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument(
        "--steps",
        type=step_range,
        metavar="FIRST:LAST",
        help="the steps to show, such as 3:8 (default: all)",
    )
    parser.add_argument("--picture", type=Path, metavar="FILE", help="PNG to write")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON file to write")


def step_range(text: str) -> tuple[int, int]:
    """Parse a range of steps, both ends included."""
    try:
        first, last = (int(part) for part in text.split(":"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FIRST:LAST, such as 3:8") from None
    if not 0 <= first <= last:
        raise argparse.ArgumentTypeError(f"{text!r}: expected 0 <= FIRST <= LAST")
    return first, last


def default_page(runs: Sequence[Path]) -> Path:
    """Return the file of the page: in the directory of one run, else in the current directory."""
    return runs[0] / _PAGE_NAME if len(runs) == 1 else Path(_PAGE_NAME)


def write_page(options: argparse.Namespace) -> None:
    """Write the page about some runs and print its name. Raises `RunUnreadable`."""
    file = options.target = options.out or default_page(options.runs)
    # These imports take a second
    from megatron_rl.records.report.page import render_page
    from megatron_rl.records.report.past_run import read_runs

    page = render_page(read_runs(options.runs))
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_text(page)
    temporary.replace(file)
    print(file)


def print_samples(options: argparse.Namespace) -> None:
    """Print samples. Raises `RunUnreadable` and `Failure`."""
    # These imports take a third of a second
    from megatron_rl.records.progress import escape_unencodable
    from megatron_rl.records.samples.show import show_samples

    escape_unencodable(sys.stdout)
    show_samples(
        options.run,
        step=options.step,
        kind=options.kind,
        follow=options.follow,
        as_json=options.json,
        is_full=options.full,
    )
    sys.stdout.flush()


def write_timeline(options: argparse.Namespace) -> None:
    """Draw the timeline of a run, and write its trace. Raises `RunUnreadable`."""
    spans = read_spans(options.run, options.steps)
    options.target = options.picture or options.run / "timeline.png"
    draw_timeline(spans, options.target)
    print(options.target)
    if options.trace is not None:
        options.target = options.trace
        options.trace.write_text(json.dumps(trace_events(spans)))
        print(options.trace)


def draw_heat_maps(options: argparse.Namespace) -> None:
    """Write the heat maps of a run and print their files. Raises `RunUnreadable`."""
    run = options.run
    if find_spec("matplotlib") is None:
        raise RunUnreadable("matplotlib draws the maps and is not installed. Run make install")
    maps = list(heat_maps(read_metrics(run)))
    if not maps:
        raise RunUnreadable(
            f"{run}: no step measured its routes. Train with train.replay_measure_every=10"
        )
    directory = options.target = run / "heat_maps"
    directory.mkdir(exist_ok=True)
    for heat_map in maps:
        file = directory / f"{heat_map.name.replace('/', '_')}.png"
        draw(heat_map, file)
        print(file)


_Command = tuple[
    str,
    str,
    Callable[[argparse.ArgumentParser], None],
    Callable[[argparse.Namespace], None],
]
# Summary, description, options and function of each command
_COMMANDS: dict[str, _Command] = {
    _PAGE: (
        "an HTML page about one or several runs (the default)",
        _PAGE_DESCRIPTION,
        _add_page_options,
        write_page,
    ),
    "samples": ("what the model says", _SAMPLES, _add_samples_options, print_samples),
    "timeline": ("when it sampled and trained", _TIMELINE, _add_timeline_options, write_timeline),
    "steps": (
        "seconds by section of a step",
        _STEPS,
        _add_run,
        lambda options: report_steps(options.run),
    ),
    "heat-maps": ("pictures of the routes", _HEAT_MAPS, _add_run, draw_heat_maps),
}

if __name__ == "__main__":
    exit_on_interrupt()
    sys.exit(main())
