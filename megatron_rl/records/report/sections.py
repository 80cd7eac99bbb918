"""The sections of a report: which charts it has, from the metrics of its runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_rl.records.heat_maps import BY_EXPERT, BY_STEP, heat_maps
from megatron_rl.records.report import charts
from megatron_rl.records.report.charts import COLOURS, Chart, Line
from megatron_rl.records.report.past_run import PastRun
from megatron_rl.records.run_summary import sampled_tokens
from megatron_rl.records.stopwatch import SECTIONS

# What comes after a step, in its order
LATER_PARTS = ("eval", "checkpoint")
_OTHER = "other"
# The parts with colours of their own. All others are drawn as one.
_PART_COLOURS = {
    "rollout": COLOURS[0],
    "old_policy": COLOURS[3],
    "measure_replay": COLOURS[6],
    "reference": COLOURS[9],
    "train": COLOURS[5],
    "next_rollouts": COLOURS[8],
    "sync": COLOURS[2],
    "eval": COLOURS[1],
    "checkpoint": COLOURS[4],
}
_OTHER_COLOUR = COLOURS[7]
_MIN_SHARE = 0.005  # of the time of a run: parts below it are not drawn
# Metrics under account/ that are no class of tokens
_NO_CLASSES = ("generated", "engine_tokens", "demonstrated", "unaccounted")
_MAX_BARS = 200  # steps in a chart of bars


@dataclass(frozen=True)
class Section:
    """A part of the page. intro: a sentence about it, "" for none."""

    title: str
    charts: tuple[Chart, ...]
    intro: str = ""


@dataclass(frozen=True)
class _Curve:
    """A chart with one line for each run. A run without the metric has none.

    from_zero: whether its axis begins at 0.
    """

    metric: str
    title: str
    note: str = ""
    from_zero: bool = False


_LEARNING = (
    _Curve("reward/mean", "Mean reward"),
    _Curve("rollout/zero_variance_rate", "Zero-variance groups", "Share of all groups."),
    _Curve("policy/nll", "Negative log-likelihood", "Mean of a trained token, in nats."),
)
_RESPONSES = (
    _Curve("rollout/response_length", "Response length", "Mean number of tokens."),
    _Curve("rollout/truncated", "Truncated responses", "Share that reached the token limit."),
    _Curve("rollout/rejected", "Rejected rollouts", "Number in each step."),
)
_POLICY = (
    _Curve("policy/entropy", "Entropy", "Mean over response tokens, in nats."),
    _Curve("policy/clip_fraction_low", "Tokens clipped low", "Share of trained tokens."),
    _Curve("policy/clip_fraction_high", "Tokens clipped high", "Share of trained tokens."),
    _Curve("train/grad_norm", "Gradient norm", "Before clipping."),
    _Curve("train/loss", "Loss"),
    _Curve("train/lr", "Learning rate"),
)
_MISMATCH = (
    _Curve(
        "mismatch/logprob_abs_mean",
        "Log-probability mismatch",
        "Mean of absolute differences, in nats.",
        from_zero=True,
    ),
    _Curve(
        "mismatch/k3_kl", "KL of engine and trainer", "The k3 estimate, in nats.", from_zero=True
    ),
    _Curve(
        "mismatch/route_disagreement",
        "Route disagreement",
        "Share of choices. Rounding causes a few percent.",
        from_zero=True,
    ),
)
_ROUNDING = (
    "Rounding alone gives a log-probability mismatch below 1e-6 with float32 on CPUs, and a few "
    "thousandths with bfloat16."
)


def sections_of(runs: Sequence[PastRun]) -> list[Section]:
    """Return the sections that have a chart."""
    candidates = [
        ("Accuracy", _accuracy_charts, "On held-out questions, with 95 % intervals."),
        ("Learning", _curves(_LEARNING), ""),
        (
            "Where the tokens went",
            _account_charts,
            "Each sampled token is in exactly one class. Those of evaluations count here, and "
            "nowhere else on this page.",
        ),
        ("Responses", _curves(_RESPONSES), ""),
        ("Policy and optimizer", _curves(_POLICY), ""),
        ("Engine against trainer", _mismatch_charts, _ROUNDING),
        ("Experts", _expert_charts, ""),
        ("Time", _time_charts, ""),
    ]
    sections = []
    for title, make, intro in candidates:
        section_charts = tuple(make(runs))
        if section_charts:
            sections.append(Section(title, section_charts, intro))
    return sections


def colour_of(index: int) -> str:
    """Return the colour of a run in every chart, one of `COLOURS`."""
    return COLOURS[index % len(COLOURS)]


def _curves(curves: Sequence[_Curve]) -> Callable[[Sequence[PastRun]], Iterator[Chart]]:
    def make(runs: Sequence[PastRun]) -> Iterator[Chart]:
        for curve in curves:
            yield from _curve(runs, curve)

    return make


def _curve(runs: Sequence[PastRun], curve: _Curve) -> Iterator[Chart]:
    lines = []
    for index, run in enumerate(runs):
        steps, values = run.series(curve.metric)
        if steps:
            lines.append(Line(run.name, steps, values, colour=colour_of(index)))
    if lines:
        yield charts.line_chart(curve.title, lines, note=curve.note, from_zero=curve.from_zero)


def _accuracy_charts(runs: Sequence[PastRun]) -> Iterator[Chart]:
    by_step = []
    by_tokens = []
    for index, run in enumerate(runs):
        evaluations = run.summary.evaluations
        if not evaluations:
            continue
        steps = [float(evaluation.step) for evaluation in evaluations]
        accuracies = [evaluation.accuracy for evaluation in evaluations]
        widths = [evaluation.half_width for evaluation in evaluations]
        colour = colour_of(index)
        by_step.append(Line(run.name, steps, accuracies, widths, colour))
        tokens = _tokens_until(run, [evaluation.step for evaluation in evaluations])
        by_tokens.append(Line(run.name, tokens, accuracies, widths, colour))
    if by_step:
        yield charts.line_chart("Accuracy by step", by_step)
        yield charts.line_chart("Accuracy by sampled tokens", by_tokens, x_label="tokens")
    yield from _set_charts(runs)


def _set_charts(runs: Sequence[PastRun]) -> Iterator[Chart]:
    """Draw the accuracy of each named set that was evaluated."""
    names = {name for run in runs for name in run.metric_names}
    for name in sorted(names):
        if name.startswith("eval/") and name.count("/") == 2 and name.endswith("/accuracy"):
            yield from _curve(runs, _Curve(name, f"Accuracy on {name.split('/')[1]}"))


def _tokens_until(run: PastRun, steps: Sequence[int]) -> list[float]:
    """Return the tokens that were sampled up to each step, without evaluations."""
    totals: dict[int, float] = {}
    total = 0.0
    for record in run.records:
        total += sampled_tokens(record)
        totals[round(record["step"] or 0)] = total
    return [totals[step] for step in steps]


def _account_charts(runs: Sequence[PastRun]) -> Iterator[Chart]:
    for run in runs:
        total = run.total("account/generated")
        if not total:
            continue
        classes = {
            name.removeprefix("account/"): run.total(name)
            for name in run.metric_names
            if name.startswith("account/") and name.removeprefix("account/") not in _NO_CLASSES
        }
        parts = {
            name.replace("_", " ").replace("/", ": "): count
            for name, count in sorted(classes.items(), key=lambda item: -item[1])
            if count > 0
        }
        yield charts.waterfall(f"Tokens of {run.name}", total, parts)
    for run in runs:
        kinds = {
            name.removeprefix("rollout/groups/").replace("_", " "): run.total(name)
            for name in sorted(run.metric_names)
            if name.startswith("rollout/groups/")
        }
        kinds = {name: count for name, count in kinds.items() if count}
        if kinds:
            yield charts.bars(f"Groups of {run.name}", kinds, unit="groups")


def _mismatch_charts(runs: Sequence[PastRun]) -> Iterator[Chart]:
    yield from _curves(_MISMATCH)(runs)
    for run in runs:
        for values in heat_maps(run.records):
            if values.name in BY_STEP and values.name != "routes/load_imbalance":
                title = f"{values.name} of {run.name}"
                yield charts.heat_map(title, values, x_label="step", note=BY_STEP[values.name])


def _expert_charts(runs: Sequence[PastRun]) -> Iterator[Chart]:
    for run in runs:
        for values in heat_maps(run.records):
            title = f"{values.name} of {run.name}"
            if values.name == BY_EXPERT:
                note = "Share of a layer's rows, in the last measured step."
                yield charts.heat_map(title, values, x_label="expert", note=note)
            elif values.name == "routes/load_imbalance":
                yield charts.heat_map(title, values, x_label="step", note=BY_STEP[values.name])


def _time_charts(runs: Sequence[PastRun]) -> Iterator[Chart]:
    yield from _curve(runs, _Curve("time/step", "Seconds of a step"))
    for run in runs:
        yield from _step_time_chart(run)
        yield from _timeline(run)


def _step_time_chart(run: PastRun) -> Iterator[Chart]:
    records = [record for record in run.records if record.get("time/step")][-_MAX_BARS:]
    if not records:
        return
    layers = {
        part: [record.get(f"time/{part}") or 0.0 for record in records]
        for part in SECTIONS
        if part in _PART_COLOURS
    }
    whole = [record.get("time/step") or 0.0 for record in records]
    parts_of_step = zip(*layers.values(), strict=True)
    layers[_OTHER] = [
        max(0.0, seconds - sum(parts)) for seconds, parts in zip(whole, parts_of_step, strict=True)
    ]
    steps = [record["step"] or 0.0 for record in records]
    visible = {
        name: values for name, values in layers.items() if sum(values) > _MIN_SHARE * sum(whole)
    }
    yield charts.stacked_bars(
        f"Seconds by part of {run.name}", steps, _in_words(visible), _colours_of(visible)
    )


def _timeline(run: PastRun) -> Iterator[Chart]:
    """Draw the parts of all steps one after the other."""
    rows: dict[str, list[tuple[float, float]]] = {}
    start = 0.0
    for record in run.records:
        for part in (*SECTIONS, *LATER_PARTS):
            names = [f"time/{part}"]
            names += (name for name in record if name.startswith(f"time/{part}/"))
            seconds = sum(record.get(name) or 0.0 for name in names)
            if seconds:
                rows.setdefault(part, []).append((start, seconds))
                start += seconds
    visible = {
        part: rows[part]
        for part in (*SECTIONS, *LATER_PARTS)
        if sum(seconds for _, seconds in rows.get(part, ())) > _MIN_SHARE * start
    }
    if visible:
        yield charts.timeline(
            f"Timeline of {run.name}",
            _in_words(visible),
            _colours_of(visible),
            note="Parts below half a percent of the time are not shown.",
        )


def _in_words[Value](values: Mapping[str, Value]) -> dict[str, Value]:
    return {name.replace("_", " "): value for name, value in values.items()}


def _colours_of(parts: Iterable[str]) -> dict[str, str]:
    return _in_words({part: _PART_COLOURS.get(part, _OTHER_COLOUR) for part in parts})
