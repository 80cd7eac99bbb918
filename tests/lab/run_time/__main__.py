"""Simulate how long a run takes, fit that to real runs, and show what sampling ahead brings.

Start it in the root of the repository:

    python -m tests.lab.run_time clusters             # the table of docs/results/ahead.md, minutes
    python -m tests.lab.run_time clusters --small     # seconds
    python -m tests.lab.run_time orders               # the table of docs/measurements.md, minutes
    python -m tests.lab.run_time measure --out runs/run_time      # 10 to 20 minutes a round
    python -m tests.lab.run_time fit --runs runs/A runs/B --held-out runs/C
    python -m tests.lab.run_time ahead --out runs/ahead           # about 5 minutes a round

`measure` trains nine short runs one after the other, and repeats that with other seeds. Constants
are fitted to six of them, and predict the others, which have other settings. Nothing else should
use the cores. Runs that are there already are not trained again.

`fit` does the same with runs of yours, which have one engine, eval.every=0 and
selection=uniform.

`ahead` measures what sampling ahead brings on this machine, and how much it can bring at most.

Output: Markdown tables of the constants, and of measured and simulated seconds a step. Runs that
differ in their seeds alone share a row. Steps before the third and the last one do not count.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from tests.lab.run_time.clusters import SMALL, Scenario, assumption_table, cluster_table
from tests.lab.run_time.fit import fit
from tests.lab.run_time.measured_run import FIRST_STEP, MeasuredRun, read_run
from tests.lab.run_time.measurement import measure
from tests.lab.run_time.orders import order_table
from tests.lab.run_time.side_by_side import measure_rounds, rounds_table
from tests.lab.run_time.validation import compare, comparison_table, constant_table

_MIN_STEPS = FIRST_STEP + 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables and return the exit code."""
    options = parse_arguments(arguments)
    # The runs that were started end with this process
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for line in _lines(options):
            print(line, flush=True)
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except subprocess.TimeoutExpired as error:
        print(f"a run took longer than {error.timeout:g} s: {error.cmd}", file=sys.stderr)
        return ExitCode.REFUSED
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.run_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    clusters = commands.add_parser("clusters", help="what sampling ahead brings on clusters")
    clusters.add_argument("--small", action="store_true", help="a small one, in seconds")
    orders = commands.add_parser("orders", help="what order and binding bring on clusters")
    orders.add_argument("--small", action="store_true", help="a small one, in seconds")
    fitting = commands.add_parser("fit", help="fit constants to runs, and predict others")
    fitting.add_argument("--runs", type=Path, nargs="+", required=True, metavar="DIR")
    fitting.add_argument("--held-out", type=Path, nargs="*", default=[], metavar="DIR")
    measuring = commands.add_parser("measure", help="train the runs first")
    measuring.add_argument("--out", type=Path, required=True, help="directory of the runs")
    measuring.add_argument("--rounds", type=int, default=3, help="with other seeds; default: 3")
    measuring.add_argument("--steps", type=int, default=15, help="of each run; default: 15")
    ahead = commands.add_parser("ahead", help="what sampling ahead brings on this machine")
    ahead.add_argument("--out", type=Path, required=True, help="directory of the runs")
    ahead.add_argument("--rounds", type=int, default=3, help="with other seeds; default: 3")
    ahead.add_argument("--steps", type=int, default=12, help="of each run; default: 12")
    options = parser.parse_args(arguments)
    if options.command in ("measure", "ahead"):
        if options.rounds < 1:
            parser.error(f"--rounds={options.rounds}: it must be at least 1")
        if options.steps < _MIN_STEPS:
            parser.error(f"--steps={options.steps}: it must be at least {_MIN_STEPS}")
    return options


def _lines(options: argparse.Namespace) -> Iterator[str]:
    match options.command:
        case "clusters":
            scenario = SMALL if options.small else Scenario()
            yield from assumption_table(scenario)
            yield ""
            yield from cluster_table(scenario)
        case "orders":
            yield from order_table(SMALL if options.small else Scenario())
        case "fit":
            runs = [read_run(directory) for directory in options.runs]
            others = [read_run(directory) for directory in options.held_out]
            yield from _fit_tables(runs, others)
        case "ahead":
            yield from rounds_table(
                measure_rounds(options.out, options.rounds, options.steps, _log)
            )
        case _:
            runs, others = measure(options.out, options.rounds, options.steps, _log)
            yield from _fit_tables(runs, others)


def _fit_tables(runs: Sequence[MeasuredRun], others: Sequence[MeasuredRun]) -> Iterator[str]:
    constants = fit(runs)
    yield from constant_table(constants)
    yield ""
    yield from comparison_table(compare(constants, runs, others))


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
