"""Train several variants over several seeds, and put what they learnt into one table and one plot.

    python launch/comparison/__main__.py --out runs/algorithms --seeds 0,1,2 \\
        --variant espo: algo=espo --variant grpo: algo=grpo --variant frozen@0,1: optimizer.lr=0

Each run is OUT/NAME-seedN. A complete one whose configuration is the one asked for is not repeated,
so the same command goes on with a comparison that was interrupted; one of another configuration is
refused. Written to OUT: table.md, curves.json, curves.png.

A fair contest: each variant first gets the same number of trials on seeds that are not reported
(OUT/search). Its best settings, and the best ones at its given clip widths, are then trained on the
reported seeds; contest.md, contest.json:

    python launch/comparison/__main__.py --out runs/contest --parallel 2 --shared-engines --variant espo: algo=espo \\
        --variant grpo: algo=grpo --search optimizer.lr=1e-4,3e-4,1e-3 clip_scale=1,10,100 \\
        --search grpo: optimizer.lr=1e-4,3e-4,1e-3 clip_scale=0.25,1,2 --search-common train.total_steps=12

Rollout tokens until equal held-out accuracy (tokens.md, tokens.json, tokens.png), which wants an
evaluation every few steps; docs/comparisons.md says how it is read:

    python launch/comparison/__main__.py --out runs/tokens --experiment mixed --equal-accuracy --against oversample \\
        --common eval.every=4 --variant oversample: selection=oversample --variant belief: selection=belief

Other metrics over the steps, in the same figure as accuracy (metrics.md, metrics.json,
metrics.png):

    python launch/comparison/__main__.py --out runs/stability --common engine.fake_quant=fp8_blockwise --metric mismatch/k3_kl \\
        --variant replay: train.replay=rollout --variant live: train.replay=off

With --shared-engines a run draws on CPUs what it would with its own, by its seed
(docs/repeatable.md). On GPUs an engine's random numbers go on from one run to the next.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.comparison.accuracy_curves import Curve, plot, read_curve, table
from launch.comparison.arguments import parser
from launch.comparison.contest import Contest, judge
from launch.comparison.contest_report import contest_record, contest_table, trial_table
from launch.comparison.errors import ended
from launch.comparison.metric_curves import (
    MetricCurves,
    metric_table,
    plot_metrics,
    read_metric_curves,
)
from launch.comparison.runner import Place, ended_by_sigterm, train_all
from launch.comparison.shared_engines import check_shareable, shared_engines
from launch.comparison.token_table import at_level, plot_tokens, token_table
from launch.comparison.variants import (
    ComparisonRefused,
    Run,
    RunPlanner,
    check_overrides,
    is_complete,
    read_variants,
)
from megatron_rl.contracts.exit_codes import ExitCode
from megatron_rl.contracts.launch_facts import LaunchFacts

SCRIPT = Path(__file__).resolve().with_name("train_rl.py")
Train = Callable[
    [Sequence[Run], Callable[[Run], None]], int
]  # those that are not complete; 0, or why one failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: that of the run that failed, or 0."""
    given = parser(__doc__ or "").parse_args(arguments)

    def work() -> int:
        _check(given)
        with ended_by_sigterm():
            return _contest(given) if given.search else _compare(given)

    return ended(work)


def _check(given: argparse.Namespace) -> None:
    """Raise `ComparisonRefused` for what can be told before any configuration is composed."""
    if find_spec("matplotlib") is None:
        raise ComparisonRefused(
            "matplotlib, which draws the plot, is not installed. Run make install"
        )
    check_overrides(given.common, "--common")
    check_overrides(given.search_common, "--search-common")
    if given.search_common and not given.search:
        raise ComparisonRefused(
            "--search-common: there is no search. Give --search key=v1,v2, or leave it out"
        )
    if given.against is not None and given.equal_accuracy is None:
        raise ComparisonRefused(
            f"--against {given.against}: it goes with --equal-accuracy. Give that too"
        )
    if given.metric and given.search:
        raise ComparisonRefused(
            f"--metric {given.metric[0]}: a search reports accuracy alone. Leave one of them out"
        )
    names = [variant.name for variant in read_variants(given.variant, given.seeds)]
    if given.against is not None and (given.search or given.against not in names):
        either = (
            "a search reports each variant twice"
            if given.search
            else f"the variants are {', '.join(names)}"
        )
        raise ComparisonRefused(
            f"--against {given.against}: {either}. Name one of them, without --search"
        )
    if given.parallel > 1 and (gpus := LaunchFacts.from_environment(os.environ).num_gpus):
        raise ComparisonRefused(
            f"--parallel {given.parallel}: {gpus} GPU(s) are visible, and runs would share them. "
            "Leave it out"
        )


def plan(given: argparse.Namespace) -> Iterator[Run]:
    """Every run with its checked configuration, without a search. Raises `ComparisonRefused`.

    Variants take turns, so that a machine that slows down slows all of them.
    """
    planner = _planner(given)
    variants = read_variants(given.variant, given.seeds)
    for turn in range(max(len(variant.seeds) for variant in variants)):
        for variant in variants:
            for seed in variant.seeds[turn : turn + 1]:
                yield planner.run(variant.name, variant.overrides, seed, label=variant.name)


def _planner(given: argparse.Namespace) -> RunPlanner:
    return RunPlanner(given.out, given.experiment, given.nproc, tuple(given.common))


def _compare(given: argparse.Namespace) -> int:
    """Train what is not complete, and report after every run."""
    runs = list(plan(given))
    done = {
        run.directory for run in runs if is_complete(run)
    }  # whatever is refused is refused before the first run

    def finished(run: Run) -> None:
        done.add(run.directory)
        _report(_by_variant(run for run in runs if run.directory in done), given.out)

    with _training(given, runs) as train:
        if code := train([run for run in runs if run.directory not in done], finished):
            return code
    results = _by_variant(runs)
    _report(results, given.out)
    _report_tokens(results, given)
    _report_metrics(runs, given)
    print((given.out / "table.md").read_text() + f"\nplot: {given.out / 'curves.png'}")
    return ExitCode.OK


def _contest(given: argparse.Namespace) -> int:
    """Search, choose, train the reported runs, report."""
    contest = _read_contest(given)
    searched = contest.searched()
    tried = [run for runs in searched.values() for run in runs]
    left = [run for run in tried if not is_complete(run)]
    with _training(given, tried) as train:
        if code := train(left, lambda run: None):
            return code
        trials = judge(searched)
        chosen = contest.chosen(trials)
        reported = contest.reported(chosen)
        left = [run for runs in reported.values() for run in runs if not is_complete(run)]
        if code := train(left, lambda run: None):
            return code
    curves = {
        key: [read_curve(run.directory, run.seed) for run in runs] for key, runs in reported.items()
    }
    budget = contest.budget(searched)
    text = [budget, "", *contest_table(reported, curves, chosen), "", *trial_table(trials, chosen)]
    (given.out / "contest.md").write_text("\n".join(text) + "\n")
    _write_json(
        given.out / "contest.json", contest_record(budget, trials, chosen, reported, curves)
    )
    results = {f"{name}, {how}": own for (name, how), own in curves.items()}
    _report(results, given.out)
    _report_tokens(results, given)
    print((given.out / "contest.md").read_text() + f"\nplot: {given.out / 'curves.png'}")
    return ExitCode.OK


def _read_contest(given: argparse.Namespace) -> Contest:
    variants = read_variants(given.variant, given.seeds)
    return Contest.read(
        variants, given.search, given.search_seeds, _planner(given), given.search_common
    )


@contextlib.contextmanager
def _training(given: argparse.Namespace, runs: Sequence[Run]) -> Iterator[Train]:
    """How runs are trained.

    Engines that they share are started when the first is, and end with the block.
    """
    if given.shared_engines:
        check_shareable(runs, LaunchFacts.from_environment(os.environ))
    with contextlib.ExitStack() as stack:
        places: list[Place] = [] if given.shared_engines else [()] * given.parallel

        def train(left: Sequence[Run], finished: Callable[[Run], None]) -> int:
            if left and not places:
                engines = shared_engines(
                    runs[0].configuration, given.parallel, given.out / "engines"
                )
                places.extend(stack.enter_context(engines))
            return train_all(left, SCRIPT, places, given.nproc, finished)

        yield train


def _by_variant(runs: Iterator[Run] | Sequence[Run]) -> dict[str, list[Curve]]:
    results: dict[str, list[Curve]] = {}
    for run in runs:
        results.setdefault(run.variant, []).append(read_curve(run.directory, run.seed))
    return results


def _report(results: dict[str, list[Curve]], out: Path) -> None:
    """Write table, curves and plot of complete runs."""
    (out / "table.md").write_text("\n".join(table(results)) + "\n")
    _write_json(
        out / "curves.json",
        {name: [asdict(curve) for curve in curves] for name, curves in results.items()},
    )
    plot(results, out / "curves.png")


def _report_tokens(results: dict[str, list[Curve]], given: argparse.Namespace) -> None:
    """Where asked for: tokens until equal accuracy. Raises `LevelRefused`."""
    if given.equal_accuracy is None:
        return
    reached = at_level(results, None if given.equal_accuracy == "highest" else given.equal_accuracy)
    (given.out / "tokens.md").write_text(
        "\n".join(token_table(results, reached, given.against)) + "\n"
    )
    _write_json(given.out / "tokens.json", asdict(reached))
    plot_tokens(results, reached, given.out / "tokens.png")
    print((given.out / "tokens.md").read_text() + f"\nplot: {given.out / 'tokens.png'}\n")


def _report_metrics(runs: Sequence[Run], given: argparse.Namespace) -> None:
    """Where asked for: other metrics over the steps. Raises `MetricRefused`."""
    if not given.metric:
        return
    results: dict[str, list[MetricCurves]] = {}
    for run in runs:
        results.setdefault(run.variant, []).append(
            read_metric_curves(run.directory, run.seed, given.metric)
        )
    (given.out / "metrics.md").write_text("\n".join(metric_table(results)) + "\n")
    _write_json(
        given.out / "metrics.json",
        {name: [asdict(run) for run in own] for name, own in results.items()},
    )
    plot_metrics(results, given.out / "metrics.png")
    print((given.out / "metrics.md").read_text() + f"\nplot: {given.out / 'metrics.png'}\n")


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
