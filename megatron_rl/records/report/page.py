"""Writes the page of a report."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from megatron_rl.records.report.charts import COLOURS, DARK_COLOURS, page_colour
from megatron_rl.records.report.past_run import PastRun
from megatron_rl.records.report.sample_views import PromptView, prompt_views
from megatron_rl.records.report.sections import colour_of, sections_of
from megatron_rl.records.run_summary import describe_seconds

_TEMPLATE = Path(__file__).with_name("page.html.j2")
_MAX_EVENTS = 60
# Metrics that say that something went wrong in a step, with their meaning
_FAULTS = {
    "train/nonfinite": "no update, because of NaN or Inf",
    "guard/skipped": "an update skipped, because of a spike",
    "rollout/rejected": "rollouts rejected",
    "rollout/engines_left_out": "engines that failed",
    "reward/no_verdict": "responses without a verdict",
    "sync/audit_mismatches": "weights of an engine differ from those sent",
}


@dataclass(frozen=True)
class RunRow:
    """A run in the table at the top of the page. tokens: sampled for its steps."""

    name: str
    colour: str
    status: str
    accuracy: str
    best: str
    steps: str
    tokens: str
    time: str
    model: str
    algorithm: str


@dataclass(frozen=True)
class Event:
    """A fault or a recovery. time: the step, or the time of day."""

    run: str
    time: str
    text: str


@dataclass(frozen=True)
class RunSamples:
    """The samples of one run."""

    run: str
    prompts: list[PromptView]


def render_page(runs: Sequence[PastRun]) -> str:
    """Return the HTML page about some runs. It needs no other file and no network."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text())
    names = ", ".join(run.name for run in runs)
    return template.render(
        title=f"Report of {names}",
        date=datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        rows=[_row(run, index) for index, run in enumerate(runs)],
        events=[event for run in runs for event in _events(run)],
        sections=sections_of(runs),
        runs_with_samples=[
            RunSamples(run.name, prompt_views(run.samples)) for run in runs if run.samples
        ],
        light_colours=COLOURS,
        dark_colours=DARK_COLOURS,
    )


def _row(run: PastRun, index: int) -> RunRow:
    summary = run.summary
    accuracy = "–"
    if summary.evaluations:
        first = summary.evaluations[0]
        last = summary.evaluations[-1]
        accuracy = str(last) if first is last else f"{first} → {last}"
    best = summary.best
    return RunRow(
        name=run.name,
        colour=page_colour(colour_of(index)),
        status=run.status,
        accuracy=accuracy,
        best="–" if best is None else f"{best.accuracy:.3f} (step {best.step})",
        steps=f"{summary.num_steps} of {run.settings.get('train.total_steps', '?')}",
        tokens=f"{summary.tokens:,}",
        time=describe_seconds(summary.seconds),
        model=Path(str(run.settings.get("model.path", "?"))).name,
        algorithm=str(run.settings.get("algo.name", "?")),
    )


def _events(run: PastRun) -> Iterator[Event]:
    for record in run.earlier_exits:
        text = f"ended with code {record.code}: {record.reason}, and was resumed"
        yield Event(run.name, record.end_time, text)
    yield from _step_events(run)
    if run.exit_record is not None and run.exit_record.code:
        record = run.exit_record
        yield Event(run.name, record.end_time, f"ended with code {record.code}: {record.reason}")
    for problem in run.problems:
        yield Event(run.name, "–", problem)


def _step_events(run: PastRun) -> Iterator[Event]:
    count = 0
    for record in run.records:
        for name, meaning in _FAULTS.items():
            value = record.get(name) or 0.0
            if value:
                count += 1
                if count <= _MAX_EVENTS:
                    step = f"step {record['step'] or 0:.0f}"
                    yield Event(run.name, step, f"{meaning} ({name} {value:g})")
    if count > _MAX_EVENTS:
        yield Event(run.name, "–", f"{count - _MAX_EVENTS} more events, see metrics.jsonl")
