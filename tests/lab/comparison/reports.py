"""Result files of a comparison."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.lab.comparison.accuracy_curves import Curve, plot, read_curve, table
from tests.lab.comparison.metric_curves import (
    MetricCurves,
    metric_table,
    plot_metrics,
    read_metric_curves,
    require_metrics,
)
from tests.lab.comparison.token_table import plot_tokens, token_table, tokens_at_level
from tests.lab.comparison.variants import Run


def curves_by_variant(runs: Iterable[Run]) -> dict[str, list[Curve]]:
    """Read the accuracy curves of complete runs. Raises `RunUnreadable`."""
    results: dict[str, list[Curve]] = {}
    for run in runs:
        results.setdefault(run.variant, []).append(read_curve(run.directory, run.seed))
    return results


def write_accuracy(results: Mapping[str, Sequence[Curve]], out: Path) -> None:
    """Write table.md, curves.json and curves.png."""
    (out / "table.md").write_text("\n".join(table(results)) + "\n")
    curves = {name: [asdict(curve) for curve in group] for name, group in results.items()}
    write_json(out / "curves.json", curves)
    plot(results, out / "curves.png")


def write_tokens(results: Mapping[str, Sequence[Curve]], options: argparse.Namespace) -> None:
    """Write and print tokens.md, tokens.json and tokens.png if --equal-accuracy asks for them.

    Raises `LevelRefused`.
    """
    if options.equal_accuracy is None:
        return
    level = None if options.equal_accuracy == "highest" else options.equal_accuracy
    tokens = tokens_at_level(results, level)
    file = options.out / "tokens.md"
    file.write_text("\n".join(token_table(results, tokens, options.against)) + "\n")
    write_json(options.out / "tokens.json", asdict(tokens))
    plot_tokens(results, tokens, options.out / "tokens.png")
    print(file.read_text() + f"\nplot: {options.out / 'tokens.png'}\n")


def write_metrics(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Write and print metrics.md, metrics.json and metrics.png if --metric asks for them.

    Raises `MetricRefused`.
    """
    if not options.metric:
        return
    results: dict[str, list[MetricCurves]] = {}
    for run in runs:
        curves = read_metric_curves(run.directory, run.seed, options.metric)
        results.setdefault(run.variant, []).append(curves)
    require_metrics(results)
    file = options.out / "metrics.md"
    file.write_text("\n".join(metric_table(results)) + "\n")
    values = {name: [_as_json(curves) for curves in group] for name, group in results.items()}
    write_json(options.out / "metrics.json", values)
    plot_metrics(results, options.out / "metrics.png")
    print(file.read_text() + f"\nplot: {options.out / 'metrics.png'}\n")


def _as_json(curves: MetricCurves) -> dict[str, Any]:
    return {"seed": curves.seed, "values": curves.values}


def write_json(file: Path, value: Any) -> None:
    """Write an indented JSON file."""
    file.write_text(json.dumps(value, indent=1) + "\n")
