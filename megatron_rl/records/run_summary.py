"""Summarises a run from its metrics: accuracy from start to end, tokens and time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_rl.records.effective_time import last_effective_time, seconds_of_step
from megatron_rl.records.past_run import Record, RunUnreadable, iterate_metrics


@dataclass(frozen=True)
class EvaluatedStep:
    """A held-out accuracy and the step that it was measured after.

    half_width: of its 95 % confidence interval.
    """

    step: int
    accuracy: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.accuracy:.3f} ± {self.half_width:.3f}"


@dataclass(frozen=True)
class RunSummary:
    """Accuracies, tokens and time of a run.

    num_steps: steps that were trained or recorded. evaluations: in the order of their steps.
    tokens: tokens that engines sampled for steps. evaluation_tokens: those sampled for evaluations.
    demonstrated_tokens: tokens of demonstrations. seconds: in steps and evaluations, over all
    starts of a resumed run. effective_time: the share of the time since the first start that became
    kept steps, None if it was not measured.
    """

    num_steps: int
    evaluations: tuple[EvaluatedStep, ...]
    tokens: int
    evaluation_tokens: int
    demonstrated_tokens: int
    seconds: float
    effective_time: float | None = None

    @property
    def best(self) -> EvaluatedStep | None:
        """The evaluation with the highest accuracy, the first one of several."""
        return max(self.evaluations, key=lambda e: (e.accuracy, -e.step), default=None)

    def lines(self) -> list[str]:
        """Return the lines for the end of a run. Omits a line without anything to say."""
        lines = [self._accuracy_line(), self._token_line(), self._time_line()]
        return [line for line in lines if line]

    def _accuracy_line(self) -> str:
        if not self.evaluations:
            return ""
        first = self.evaluations[0]
        last = self.evaluations[-1]
        if first is last:
            return f"held-out accuracy {last} (step {last.step})"
        text = (
            f"held-out accuracy {first} (step {first.step}) → {last} (step {last.step}), 95 % "
            "intervals"
        )
        best = self.best
        if best is not None and best.step != last.step:
            text += f"; best {best} (step {best.step})"
        return text

    def _token_line(self) -> str:
        parts = []
        if self.tokens:
            parts.append(f"{self.tokens:,} tokens sampled")
        if self.demonstrated_tokens:
            parts.append(f"{self.demonstrated_tokens:,} tokens of demonstrations")
        if not parts:
            return ""
        steps = f"{self.num_steps} step{'' if self.num_steps == 1 else 's'}"
        line = f"{' and '.join(parts)} in {steps} and {describe_seconds(self.seconds)}"
        if self.evaluation_tokens:
            line += f"; evaluations sampled {self.evaluation_tokens:,} tokens"
        return line

    def _time_line(self) -> str:
        if self.effective_time is None:
            return ""
        return (
            f"effective training time {self.effective_time:.0%} of the time since the first start"
        )


def summarize(records: Iterable[Record]) -> RunSummary:
    """Summarise the records of metrics.jsonl. Of several records of a step, the last counts."""
    record_by_step = {round(record["step"] or 0): record for record in records}
    ordered_records = [record_by_step[step] for step in sorted(record_by_step)]
    return RunSummary(
        num_steps=sum(step > 0 for step in record_by_step),
        evaluations=tuple(_evaluations(ordered_records)),
        tokens=round(sum(map(sampled_tokens, ordered_records))),
        evaluation_tokens=round(_total(ordered_records, "account/evaluation")),
        demonstrated_tokens=round(_total(ordered_records, "account/demonstrated")),
        seconds=sum(map(_seconds, ordered_records)),
        effective_time=last_effective_time(ordered_records),
    )


def sampled_tokens(record: Record) -> float:
    """Return the tokens that engines sampled for a step, without the tokens of evaluations."""
    return (record.get("account/generated") or 0.0) - (record.get("account/evaluation") or 0.0)


def summarize_run(directory: Path) -> RunSummary:
    """Summarise the run in `directory`. Raises `RunUnreadable`."""
    return summarize(iterate_metrics(directory))


def closing_lines(directory: Path) -> list[str]:
    """Return the lines for the end of a complete run: results, places, and the next command.

    A file that cannot be read costs its lines, not the run.
    """
    lines: list[str] = []
    with contextlib.suppress(RunUnreadable):
        lines += summarize_run(directory).lines()
    weights = sorted(directory.glob("checkpoints/step-*"), key=_step_of)
    place = f"; the weights are in {weights[-1]}" if weights else ""
    lines.append(f"done: metrics, logs and checkpoints are in {directory}{place}")
    lines.append(f"next: python launch/report.py {directory}")
    return lines


def describe_seconds(seconds: float) -> str:
    """Return a time for people: `48 s`, `12 min 5 s` or `3 h 20 min`."""
    total = round(seconds)
    minutes, rest = divmod(total, 60)
    if not minutes:
        return f"{total} s"
    hours, minutes_of_hour = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest} s"
    return f"{hours} h {minutes_of_hour} min"


def _evaluations(records: Iterable[Record]) -> Iterable[EvaluatedStep]:
    for record in records:
        accuracy = record.get("eval/accuracy")
        if accuracy is not None:
            half_width = record.get("eval/accuracy_ci95") or 0.0
            yield EvaluatedStep(round(record["step"] or 0), accuracy, half_width)


def _total(records: Iterable[Record], name: str) -> float:
    return sum(record.get(name) or 0.0 for record in records)


def _seconds(record: Record) -> float:
    """The seconds of a record: of its step and of what came after it."""
    return seconds_of_step(record) + (record.get("time/checkpoint") or 0.0)


def _step_of(weights: Path) -> int:
    number = weights.name.removeprefix("step-")
    return int(number) if number.isdecimal() else -1
