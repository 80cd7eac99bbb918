"""Everything that a report reads of one run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_rl.contracts.exit_codes import Failure
from megatron_rl.records.exit_record import ExitRecord, read_exit_record
from megatron_rl.records.past_run import Record, read_metrics, read_settings
from megatron_rl.records.run_directory import ARCHIVE
from megatron_rl.records.run_lock import run_is_alive
from megatron_rl.records.run_summary import RunSummary, summarize
from megatron_rl.records.samples.reader import read_samples, sample_steps
from megatron_rl.records.samples.sample import Sample


@dataclass(frozen=True)
class PastRun:
    """A run that is complete, failed or still going.

    name: unique within a report. records: one for each step, ascending. earlier_exits: the exits
    of the starts before the last one. samples: of the last step that kept some. problems: what
    could not be read.
    """

    name: str
    directory: Path
    records: tuple[Record, ...]
    settings: dict[str, Any]
    exit_record: ExitRecord | None
    earlier_exits: tuple[ExitRecord, ...]
    is_alive: bool
    samples: tuple[Sample, ...]
    problems: tuple[str, ...]

    @property
    def summary(self) -> RunSummary:
        """The accuracies, tokens and time of the run."""
        return summarize(self.records)

    @property
    def status(self) -> str:
        """`complete`, `running`, `failed` or `killed`."""
        if self.exit_record is not None:
            return "failed" if self.exit_record.code else "complete"
        return "running" if self.is_alive else "killed"

    @property
    def metric_names(self) -> set[str]:
        """The names of all metrics that some step has."""
        return {name for record in self.records for name in record}

    def series(self, name: str) -> tuple[list[float], list[float]]:
        """Return the steps that have a metric, and its values."""
        points = [
            (record["step"] or 0.0, value)
            for record in self.records
            if (value := record.get(name)) is not None
        ]
        return [step for step, _ in points], [value for _, value in points]

    def total(self, name: str) -> float:
        """Return the sum of a metric over all steps."""
        return sum(self.series(name)[1])


def read_run(directory: Path, name: str) -> PastRun:
    """Read a run. Raises `RunUnreadable` if its metrics or settings cannot be read.

    Samples that cannot be read become a problem of the run.
    """
    problems: list[str] = []
    records = {round(record["step"] or 0): record for record in read_metrics(directory)}
    return PastRun(
        name=name,
        directory=directory,
        records=tuple(records[step] for step in sorted(records)),
        settings=read_settings(directory),
        exit_record=read_exit_record(directory),
        earlier_exits=tuple(_earlier_exits(directory)),
        is_alive=run_is_alive(directory),
        samples=tuple(_last_samples(directory, problems.append)),
        problems=tuple(problems),
    )


def read_runs(directories: Sequence[Path]) -> list[PastRun]:
    """Read runs and give them short, different names. Raises `RunUnreadable`."""
    names = [directory.resolve().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    return [read_run(directory, name) for directory, name in zip(directories, names, strict=True)]


def _earlier_exits(directory: Path) -> Iterator[ExitRecord]:
    folders = (path for path in (directory / ARCHIVE).glob("*") if path.name.isdecimal())
    for folder in sorted(folders, key=lambda path: int(path.name)):
        record = read_exit_record(folder)
        if record is not None:
            yield record


def _last_samples(directory: Path, report: Callable[[str], None]) -> list[Sample]:
    steps = sample_steps(directory)
    with contextlib.suppress(IndexError):
        try:
            return list(read_samples(directory, steps[-1]))
        except Failure as failure:
            report(str(failure))
    return []
