"""Prints the seconds of each section of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

from megatron_rl.records.effective_time import seconds_of_evaluations
from megatron_rl.records.past_run import Record, RunUnreadable, read_metrics
from megatron_rl.records.stopwatch import SECTIONS

_OTHER = "other"


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
    durations_by_name = {
        "evaluation": map(seconds_of_evaluations, records),
        "checkpoint": (_seconds(record, "checkpoint") for record in records),
    }
    for name, all_durations in durations_by_name.items():
        durations = [duration for duration in all_durations if duration]
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
