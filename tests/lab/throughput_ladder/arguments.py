"""The arguments that the commands of the ladder have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def open_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    """Make a parser with the arguments of all commands."""
    parser = argparse.ArgumentParser(
        prog=program,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--seeds", type=int, default=3, help="steps with other lengths; default: 3")
    parser.add_argument("--rounds", type=int, default=3, help="of all steps; default: 3")
    parser.add_argument("--prompts", type=int, default=16, help="of a step; default: 16")
    parser.add_argument("--max-running", type=int, default=8, help="of an engine; default: 8")
    return parser


def add_spread(parser: argparse.ArgumentParser) -> None:
    """Add the argument of commands whose lengths may differ more or less."""
    parser.add_argument("--spread", type=float, default=1.2, help="of log lengths; default: 1.2")


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, *more_counts: str
) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2.

    more_counts: arguments of this command that have to be at least 1.
    """
    options = parser.parse_args(arguments)
    for name in ("seeds", "rounds", "prompts", "max_running", *more_counts):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}={getattr(options, name)}: at least 1")
    if options.seeds * options.rounds < 2:
        parser.error("one step has no interval: give more --seeds or --rounds")
    return options
