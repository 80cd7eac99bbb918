"""Report what one or several runs reached: a page, the time of a step, or the expert routes.

Examples:

    python launch/report.py runs/NAME
    python launch/report.py runs/A runs/B --out comparison.html
    python launch/report.py steps runs/NAME
    python launch/report.py heat-maps runs/NAME

Outputs: without a command, one HTML page with curves, token account, times, faults and samples.
`steps` prints a Markdown table of seconds by section of a step. `heat-maps` writes
runs/NAME/heat_maps/*.png and prints their names; the run needs train.replay_measure_every. The
runs may be finished or running.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.heat_maps import draw, heat_maps
from megatron_rl.records.past_run import Record, RunUnreadable, read_metrics
from megatron_rl.records.stopwatch import SECTIONS
from megatron_rl.records.write_errors import write_problem

_OTHER = "other"
_PAGE = "page"
_PAGE_NAME = "report.html"
_PAGE_DESCRIPTION = """Write one HTML page about one or several runs, in the same charts.

    python launch/report.py runs/NAME
    python launch/report.py runs/A runs/B --out comparison.html

Output: RUN/report.html, or report.html for several runs. It needs no network and no other file.
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
    target = Path()
    try:
        if options.command == _PAGE:
            target = options.out or default_page(options.runs)
            write_page(options.runs, target)
        elif options.command == "steps":
            report_steps(options.run)
        else:
            target = options.run / "heat_maps"
            draw_heat_maps(options.run)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except OSError as error:
        problem = write_problem(error, target)
        if problem is None:
            raise
        print(problem, file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] not in (_PAGE, "steps", "heat-maps", "-h", "--help"):
        words.insert(0, _PAGE)
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{page,steps,heat-maps}"
    )
    page = commands.add_parser(
        _PAGE,
        help="an HTML page about one or several runs (the default)",
        description=_PAGE_DESCRIPTION,
        formatter_class=raw,
        allow_abbrev=False,
    )
    page.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="directory of a run, such as runs/NAME"
    )
    page.add_argument(
        "--out", metavar="FILE", type=Path, help="the page, instead of RUN/report.html"
    )
    summaries = {"steps": "seconds by section of a step", "heat-maps": "pictures of the routes"}
    for name, description in (("steps", _STEPS), ("heat-maps", _HEAT_MAPS)):
        command = commands.add_parser(
            name,
            help=summaries[name],
            description=description,
            formatter_class=raw,
            allow_abbrev=False,
        )
        command.add_argument(
            "run", metavar="RUN", type=Path, help="directory of a run, such as runs/NAME"
        )
    return parser.parse_args(words)


def default_page(runs: Sequence[Path]) -> Path:
    """Return the file of the page: in the directory of one run, else in the current directory."""
    return runs[0] / _PAGE_NAME if len(runs) == 1 else Path(_PAGE_NAME)


def write_page(runs: Sequence[Path], file: Path) -> None:
    """Write the page about some runs and print its name. Raises `RunUnreadable`."""
    # These imports take a second
    from megatron_rl.records.report.page import render_page
    from megatron_rl.records.report.past_run import read_runs

    page = render_page(read_runs(runs))
    temporary = file.with_name(f"{file.name}.part")
    temporary.write_text(page)
    temporary.replace(file)
    print(file)


def report_steps(run: Path) -> None:
    """Print the step times of a run. Raises `RunUnreadable`."""
    records = read_metrics(run)
    steps = [record for record in records if _seconds(record, "step") > 0]
    if not steps:
        raise RunUnreadable(
            f"{run}: no step is complete. Wait for the first step, or give another run"
        )
    print("\n".join(step_table(steps)))
    print()
    print("\n".join(totals(records)))


def step_table(steps: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of a Markdown table of complete steps, at least one."""
    first = steps[0]
    later = _later(steps)
    whole = mean(_seconds(record, "step") for record in later)
    yield "| section | first step, s | later steps, s | share |"
    yield "|---|---|---|---|"
    for section in _sections_of(steps):
        seconds = mean(_seconds(record, section) for record in later)
        yield _row(section, _seconds(first, section), seconds, whole)
    yield _row(_OTHER, _other_seconds(first), mean(map(_other_seconds, later)), whole)
    yield f"| whole step | {_seconds(first, 'step'):.2f} | {whole:.2f} | |"


def totals(records: Sequence[Record]) -> Iterator[str]:
    """Yield the seconds of all steps, evaluations and checkpoints of a run."""
    steps = [record for record in records if _seconds(record, "step") > 0]
    exposed_seconds = mean(_seconds(record, "reward_exposed") for record in _later(steps))
    seconds = sum(_seconds(step, "step") for step in steps)
    num_steps = _count(len(steps), "step")
    yield f"{num_steps}: {seconds:.1f} s; reward time exposed {exposed_seconds:.3f} s a step"
    together = seconds
    for section, name in (("eval", "evaluation"), ("checkpoint", "checkpoint")):
        durations = [_seconds(record, section) for record in records if _seconds(record, section)]
        if durations:
            each = f", {mean(durations):.1f} s each" if len(durations) > 1 else ""
            yield f"{_count(len(durations), name)}: {sum(durations):.1f} s{each}"
            together += sum(durations)
    if together > seconds:
        yield f"together: {together:.1f} s"


def _sections_of(steps: Sequence[Record]) -> Iterator[str]:
    """Yield the sections that every training step has, and the others that some step has."""
    for section, is_in_every_step in SECTIONS.items():
        if is_in_every_step or any(_seconds(step, section) for step in steps):
            yield section


def _other_seconds(step: Record) -> float:
    """The seconds of a step that are in no section."""
    return max(0.0, _seconds(step, "step") - sum(_seconds(step, name) for name in SECTIONS))


def _row(section: str, first: float, later: float, whole: float) -> str:
    return f"| {section} | {first:.2f} | {later:.2f} | {later / whole:.0%} |"


def _count(number: int, name: str) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _later(steps: Sequence[Record]) -> Sequence[Record]:
    """Return all steps but the first, or the only one."""
    return steps[1:] or steps


def _seconds(record: Record, section: str) -> float:
    return record.get(f"time/{section}") or 0.0


def draw_heat_maps(run: Path) -> None:
    """Write the heat maps of a run and print their files. Raises `RunUnreadable`."""
    if find_spec("matplotlib") is None:
        raise RunUnreadable("matplotlib draws the maps and is not installed. Run make install")
    maps = list(heat_maps(read_metrics(run)))
    if not maps:
        raise RunUnreadable(
            f"{run}: no step measured its routes. Train with train.replay_measure_every=10"
        )
    directory = run / "heat_maps"
    directory.mkdir(exist_ok=True)
    for heat_map in maps:
        file = directory / f"{heat_map.name.replace('/', '_')}.png"
        draw(heat_map, file)
        print(file)


if __name__ == "__main__":
    sys.exit(main())
