"""Command line of a comparison."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tests.lab.comparison.variants import read_seeds


def make_parser(documentation: str) -> argparse.ArgumentParser:
    """Make the parser of the command line.

    documentation: the first paragraph becomes the description, and the rest follows the options.
    """
    description, _, epilog = documentation.partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.comparison",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_runs(parser)
    _add_speed(parser.add_argument_group("several runs at a time"))
    _add_tokens(parser.add_argument_group("tokens to equal accuracy"))
    parser.add_argument_group("other metrics").add_argument(
        "--metric",
        action="append",
        default=[],
        metavar="NAME",
        help="also report this metric over the steps, such as mismatch/k3_kl; repeat for each",
    )
    return parser


def _add_runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, type=_directory, help="directory of the runs and of the results"
    )
    parser.add_argument(
        "--seeds",
        default="0,1,2",
        type=_seeds,
        help="seeds of variants without their own (default: 0,1,2)",
    )
    parser.add_argument(
        "--experiment",
        default="quickstart",
        help="experiment that every run starts from (default: %(default)s)",
    )
    parser.add_argument(
        "--nproc",
        default=os.environ.get("NPROC", "1"),
        type=_ranks,
        help="ranks of each run (default: $NPROC, or 1)",
    )
    parser.add_argument(
        "--common", nargs="*", default=[], metavar="key=value", help="overrides of every run"
    )
    parser.add_argument(
        "--variant",
        action="append",
        nargs="+",
        required=True,
        metavar=("NAME:", "key=value"),
        help="a variant and its overrides; repeat for each. NAME@SEEDS: gives it its own seeds",
    )


def _add_speed(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--parallel",
        default=1,
        type=_runs,
        metavar="N",
        help="number of runs at a time; with more than one, outputs go to OUT/logs (default: 1)",
    )
    group.add_argument(
        "--shared-engines",
        action="store_true",
        help="start N engines once, and let all runs use them one after another (CPU only)",
    )


def _add_tokens(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--equal-accuracy",
        nargs="?",
        const="highest",
        type=_level,
        metavar="LEVEL",
        help="also report the rollout tokens of each run until this held-out accuracy (without a "
        "value: the highest that all runs reach)",
    )
    group.add_argument(
        "--against",
        metavar="NAME",
        help="variant whose tokens are divided by each variant's tokens",
    )


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("it names no directory")
    return Path(text).expanduser().resolve()


def _ranks(text: str) -> int:
    return _positive_number(text, "a number of ranks")


def _runs(text: str) -> int:
    return _positive_number(text, "a number of runs")


def _positive_number(text: str, meaning: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}: give a whole number from 1")
    return int(text)


def _level(text: str) -> float | str:
    if text == "highest":
        return text
    try:
        level = float(text)
    except ValueError:
        level = 0.0
    if not 0 < level < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an accuracy: give a number between 0 and 1, or no value"
        )
    return level


def _seeds(text: str) -> tuple[int, ...]:
    try:
        return read_seeds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
