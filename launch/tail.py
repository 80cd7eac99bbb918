"""Show what the model of a run says: the shortest, the longest and the surest incorrect response.

Examples:

    python launch/tail.py runs/NAME
    python launch/tail.py runs/NAME --follow
    python launch/tail.py runs/NAME --step 10 --kind most-clipped
    python launch/tail.py runs/NAME --step 10 --kind all --json

The samples are those that samples.every keeps, of the newest step unless --step names another. The
run may be finished or running. docs/samples.md describes the files.

Outputs: texts for a terminal of 80 columns or more, or one JSON object a line. Control characters
that the model wrote are shown as escapes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.contracts.interrupts import exit_on_interrupt
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import RunUnreadable, read_settings
from megatron_rl.records.progress import escape_unencodable
from megatron_rl.records.reminder import Reminder
from megatron_rl.records.run_directory import is_run_directory
from megatron_rl.records.samples.files import sample_steps, samples_file
from megatron_rl.records.samples.reader import SamplesUnreadable, read_samples
from megatron_rl.records.samples.sample import Sample, SampleKind
from megatron_rl.records.samples.terminal import SamplePrinter, to_json

_DEFAULT_KINDS = (SampleKind.SHORTEST, SampleKind.LONGEST, SampleKind.SUREST_INCORRECT)
_ALL = "all"
_POLL_SECONDS = 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the samples and return the exit code."""
    options = parse_arguments(arguments)
    escape_unencodable(sys.stdout)
    try:
        show(options)
        sys.stdout.flush()
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, has enough. Python must not write the rest at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return ExitCode.OK


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. A mistake ends the program with code 2."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="directory of a run, such as runs/NAME"
    )
    parser.add_argument(
        "--follow", "-f", action="store_true", help="wait for new samples until the run ends"
    )
    parser.add_argument("--step", type=int, metavar="N", help="show this step")
    parser.add_argument(
        "--kind",
        choices=[*map(str, SampleKind), _ALL],
        help="show one kind, or all kept responses (default: the first three kinds)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line")
    parser.add_argument("--full", action="store_true", help="print long texts without a gap")
    return parser.parse_args(arguments)


def show(options: argparse.Namespace) -> None:
    """Print the samples of the chosen steps.

    Raises `RunUnreadable` for a directory of something else, and `SamplesUnreadable`.
    """
    run: Path = options.run
    if not is_run_directory(run):
        raise RunUnreadable(
            f"{run} is not the directory of a run. Give one, such as runs/NAME, whose name the "
            "last line of a run prints"
        )
    printer = None if options.json else SamplePrinter(sys.stdout, is_full=options.full)
    steps = _follow(run, options.step) if options.follow else [_one_step(run, options.step)]
    for step in steps:
        for sample in _select(read_samples(run, step), options.kind):
            if printer is None:
                print(json.dumps(to_json(sample), allow_nan=False))
            else:
                printer.print(sample)
        sys.stdout.flush()


def _one_step(run: Path, step: int | None) -> int:
    """Return the step to show. Raises `SamplesUnreadable` for one without samples."""
    steps = sample_steps(run)
    if not steps:
        raise SamplesUnreadable(
            f"{run} has no samples yet ({_period(run)}). Wait for its first step with --follow"
        )
    if step is not None and step not in steps:
        raise SamplesUnreadable(
            f"{run} has no samples of step {step}. It has those of {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


def _follow(run: Path, step: int | None) -> Iterator[int]:
    """Yield the newest step, and each new one until the run ends.

    step: only this one, which ends the wait. A step that a resumed run trains again is new. Raises
    `SamplesUnreadable` if the run ends without it.
    """
    shown_files: dict[int, tuple[int, int]] = {}
    reminder = Reminder()
    while True:
        has_ended = read_exit_record(run) is not None
        for new_step in _new_steps(run, step, shown_files):
            yield new_step
            reminder = Reminder()
            if step is not None:
                return
        if has_ended:
            break
        if reminder.is_due():
            print(_waiting_line(run, reminder.seconds), file=sys.stderr)
        time.sleep(_POLL_SECONDS)
    _one_step(run, step)  # raises if there was nothing to show


def _new_steps(run: Path, step: int | None, shown_files: dict[int, tuple[int, int]]) -> list[int]:
    """Return the steps whose files are not in `shown_files`, and add them. At first the newest."""
    steps = [kept_step for kept_step in sample_steps(run) if step in (None, kept_step)]
    files = {kept_step: _identity(run, kept_step) for kept_step in steps}
    new_steps = [s for s, file in files.items() if shown_files.get(s) != file]
    newest = new_steps if shown_files else new_steps[-1:]
    shown_files |= files
    return newest


def _identity(run: Path, step: int) -> tuple[int, int]:
    """Return what tells a file from one that replaced it."""
    try:
        status = samples_file(run, step).stat()
    except FileNotFoundError:
        return 0, 0
    return status.st_mtime_ns, status.st_ino


def _select(samples: Iterator[Sample], kind: str | None) -> Iterator[Sample]:
    """Yield the samples of a kind, or of the default kinds in their order."""
    if kind == _ALL:
        yield from samples
        return
    kinds = _DEFAULT_KINDS if kind is None else (SampleKind(kind),)
    matches = [sample for sample in samples if set(sample.kinds) & set(kinds)]
    yield from sorted(matches, key=lambda sample: _first_index(kinds, sample))


def _first_index(kinds: Sequence[SampleKind], sample: Sample) -> int:
    return min(index for index, kind in enumerate(kinds) if kind in sample.kinds)


def _waiting_line(run: Path, seconds: float) -> str:
    return f"waiting for new samples of {run} for {seconds:.0f} s ({_period(run)})"


def _period(run: Path) -> str:
    every = read_settings(run).get("samples.every", 0)
    return f"samples.every={every}"


if __name__ == "__main__":
    exit_on_interrupt()
    sys.exit(main())
