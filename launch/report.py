"""Report where the time of a run went, or draw what it measured of its expert routes.

Examples:

    python launch/report.py steps runs/NAME
    python launch/report.py heat-maps runs/NAME

Outputs: `steps` prints a Markdown table of seconds by section of a step. `heat-maps` writes
runs/NAME/heat_maps/*.png and prints their names; the run needs train.replay_measure_every. The
run may be finished or running.
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
from megatron_rl.records.write_errors import write_problem

SECTIONS = ("rollout", "exchange", "old_policy", "train", "sync")
_STEPS = """Print the seconds of each section of a step: of the first step, which compiles, and the
mean of all later steps.

    python launch/report.py steps runs/NAME

Output: a Markdown table, and one line about evaluations if there were any.
"""
_HEAT_MAPS = """Draw what a run measured of its expert routes, layer by layer.

    python launch/report.py heat-maps runs/NAME

Outputs: runs/NAME/heat_maps/*.png, whose names are printed. Train with
train.replay_measure_every=10 to have such measurements.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the subcommand and return the exit code."""
    options = parse_arguments(arguments)
    reports = {"steps": report_steps, "heat-maps": draw_heat_maps}
    try:
        reports[options.command](options.run)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except OSError as error:
        problem = write_problem(error, options.run / "heat_maps")
        if problem is None:
            raise
        print(problem, file=sys.stderr)
        return ExitCode.CANNOT_WRITE
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="{steps,heat-maps}")
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
    return parser.parse_args(arguments)


def report_steps(run: Path) -> None:
    """Print the step times of a run. Raises `RunUnreadable`."""
    records = read_metrics(run)
    steps = [record for record in records if _seconds(record, "step") > 0]
    if not steps:
        raise RunUnreadable(
            f"{run}: no step is complete. Wait for the first step, or give another run"
        )
    print("\n".join(step_table(steps)))
    evaluations = [seconds for record in records if (seconds := _seconds(record, "eval")) > 0]
    if evaluations:
        reward_seconds = mean(_seconds(record, "reward_exposed") for record in _later(steps))
        print(
            f"\n{len(evaluations)} evaluations of {mean(evaluations):.1f} s each; "
            f"reward time exposed {reward_seconds:.3f} s a step"
        )


def step_table(steps: Sequence[Record]) -> Iterator[str]:
    """Yield the lines of a Markdown table of complete steps, at least one."""
    first = steps[0]
    later = _later(steps)
    whole = mean(_seconds(record, "step") for record in later)
    yield "| section | first step, s | later steps, s | share |"
    yield "|---|---|---|---|"
    for section in SECTIONS:
        seconds = mean(_seconds(record, section) for record in later)
        share = seconds / whole
        yield f"| {section} | {_seconds(first, section):.2f} | {seconds:.2f} | {share:.0%} |"
    yield f"| whole step | {_seconds(first, 'step'):.2f} | {whole:.2f} | |"


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
