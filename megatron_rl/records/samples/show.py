"""Shows responses of a run: the shortest, the longest and the surest incorrect one of a step."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_rl.contracts.exit_codes import ExitCode, Failure
from megatron_rl.records.exit_record import read_exit_record
from megatron_rl.records.past_run import RunUnreadable, read_settings
from megatron_rl.records.reminder import Reminder
from megatron_rl.records.run_directory import is_run_directory
from megatron_rl.records.samples.files import sample_steps, samples_file
from megatron_rl.records.samples.reader import read_samples
from megatron_rl.records.samples.sample import ALL_KINDS, Sample, SampleKind
from megatron_rl.records.samples.terminal import SamplePrinter, to_json

_DEFAULT_KINDS = (SampleKind.SHORTEST, SampleKind.LONGEST, SampleKind.SUREST_INCORRECT)
_POLL_SECONDS = 0.5


def show_samples(
    run: Path,
    *,
    step: int | None = None,
    kind: str | None = None,
    follow: bool = False,
    as_json: bool = False,
    is_full: bool = False,
) -> None:
    """Print samples of a run, for a terminal of 80 columns or more.

    step: None shows the newest one. kind: of the samples, `ALL_KINDS` or None for the default ones.
    follow: wait for new samples until the run ends. as_json: print one JSON object a line.
    is_full: print long texts without a gap.
    Raises `RunUnreadable` for a directory of something else, and `Failure`.
    """
    if not is_run_directory(run):
        raise RunUnreadable(
            f"{run} is not the directory of a run. Give one, such as runs/NAME, whose name the "
            "last line of a run prints"
        )
    printer = None if as_json else SamplePrinter(sys.stdout, is_full=is_full)
    steps = _follow(run, step) if follow else [_one_step(run, step)]
    for shown_step in steps:
        for sample in _select(read_samples(run, shown_step), kind):
            if printer is None:
                print(json.dumps(to_json(sample), allow_nan=False))
            else:
                printer.print(sample)
        sys.stdout.flush()


def _one_step(run: Path, step: int | None) -> int:
    """Return the step to show. Raises `Failure` for one without samples."""
    steps = sample_steps(run)
    if not steps:
        raise Failure(
            f"{run} has no samples yet ({_period(run)}). Wait for its first step with --follow",
            ExitCode.REFUSED,
        )
    if step is not None and step not in steps:
        raise Failure(
            f"{run} has no samples of step {step}. It has samples of {', '.join(map(str, steps))}",
            ExitCode.REFUSED,
        )
    return steps[-1] if step is None else step


def _follow(run: Path, step: int | None) -> Iterator[int]:
    """Yield the newest step, and each new one until the run ends.

    step: only this one, which ends the wait. A step that a resumed run trains again is new. Raises
    `Failure` if the run ends without it.
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
    if kind == ALL_KINDS:
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
